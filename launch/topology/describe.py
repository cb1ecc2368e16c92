"""Describes a topology for people: as rows of a table, and as comments in a cluster's file beside detected fields."""

from __future__ import annotations

from collections import Counter

from psgc.launch.topology.machine import Gpu, Nic, Topology, cores_text


def rows(found: Topology, switch_size: int = 0, roots: tuple[int, ...] = ()) -> list[list[str]]:
    """Rows of two columns: the name and the finding. switch_size: BYTEPS_PCIE_SWITCH_SIZE, or 0; roots: BYTEPS_REDUCE_ROOTS, or ()."""
    table = [["GPUs", _gpus(found)]]
    if found.gpus:
        nearest = found.nearest_nic()
        table += [[f"GPU {gpu.index}", _gpu(found, gpu, nearest.get(gpu.index))] for gpu in found.gpus]
        groups = "; ".join(" ".join(map(str, group)) for group in found.switch_groups(switch_size))
        table.append(["PCIe switches", groups + (" (BYTEPS_PCIE_SWITCH_SIZE)" if switch_size else "")])
        away = found.reduce_roots(switch_size)
        detected = f"{' '.join(map(str, away))} (off the switches of network interfaces)" if away else "any GPU"
        table.append(["reduction roots", detected + (", which BYTEPS_REDUCE_ROOTS=auto takes" if away else "")])
    table += within(switch_size, roots)
    table += [[f"interface {nic.name}", _nic(nic)] for nic in found.nics] or [["interfaces", "none with hardware behind it"]]
    table += [[f"NUMA node {node}", f"cores {cores_text(cores)}"] for node, cores in found.numa.items()]
    table += [[f"socket {socket}", f"cores {cores_text(cores)}"] for socket, cores in found.sockets.items()]
    return table + [["not known", note] for note in found.notes]


def within(switch_size: int, roots: tuple[int, ...]) -> list[list[str]]:
    """How hierarchical plans sum within a node, if this environment sets roots or switches."""
    table = []
    if roots:
        table.append(["shards of a node's sums", f"on local ranks {' '.join(map(str, roots))} alone (BYTEPS_REDUCE_ROOTS)"])
    if switch_size > 1:
        table.append(["sums of a node", f"of each {switch_size} local ranks first, then between these groups (BYTEPS_PCIE_SWITCH_SIZE)"])
    return table


def _gpus(found: Topology) -> str:
    if not found.gpus:
        return "none"
    names = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in found.gpus).items())
    return f"{names}; {links_text(found)}" if len(found.gpus) > 1 else names


def links_text(found: Topology) -> str:
    """The links between the GPUs, in words."""
    links = found.nvlinks_of_a_gpu
    if links:
        return f"NVLink, {links} a GPU"
    some = any(found.nvlinks(one, other) for one in found.gpus for other in found.gpus if one != other)
    return "PCIe, and NVLink between some" if some else "PCIe"


def _gpu(found: Topology, gpu: Gpu, nic: Nic | None) -> str:
    others = Counter(_link(found, gpu, other) for other in found.gpus if other != gpu)
    parts = [
        f"{gpu.bus}",
        f"NUMA node {gpu.numa}" if gpu.numa >= 0 else "",
        f"PCIe {gpu.generation} x{gpu.lanes}" if gpu.generation else "",
    ]
    parts.append(" ".join(f"{path}:{count}" for path, count in others.items()))
    parts.append(f"nearest interface {nic.name} ({found.path(gpu, nic) or 'path unknown'})" if nic is not None else "")
    return ", ".join(part for part in parts if part)


def _link(found: Topology, one: Gpu, other: Gpu) -> str:
    links = found.nvlinks(one, other)
    return f"NV{links}" if links else found.path(one, other) or "unknown"


def _nic(nic: Nic) -> str:
    speed = f"{nic.mbit / 1000:g} Gbit/s" if nic.mbit else "speed not told"
    parts = [
        speed,
        nic.bus,
        f"NUMA node {nic.numa}" if nic.numa >= 0 else "",
        f"RDMA device {nic.rdma}" if nic.rdma else "",
        "" if nic.up else "down",
    ]
    return ", ".join(part for part in parts if part)
