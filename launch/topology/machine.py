"""The record of a machine's topology, and what is derived from it: switch groups, nearest interfaces, reduction roots. Pure.

Words of ``nvidia-smi topo -m`` for the path between two devices: NV4 (four NVLinks), PIX (one PCIe bridge), PXB (several), PHB (the host bridge), NODE
(between host bridges of one NUMA node), SYS (between NUMA nodes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from psgc.errors import UsageError

PATHS: Final = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first
_NVLINK: Final = re.compile(r"NV(\d{1,2})$")
MOST_NVLINKS: Final = 18  # of one GPU (H100); a sum beyond it means that all go to a switch
NVLINK_GBPS: Final = 200.0  # one link, one way: V100, A100 and H100 have 25 GB/s
# One way and lane, after encoding, by PCIe generation; about four fifths of it are achieved.
PCIE_LANE_GBPS: Final = {1: 2.0, 2: 4.0, 3: 7.88, 4: 15.75, 5: 31.5, 6: 60.5}
PCIE_ACHIEVED: Final = 0.8


@dataclass(frozen=True, slots=True)
class Gpu:
    """bus: PCI address, as in 0000:07:00.0; place: PCI bridges above it, from the root; numa: -1 if unknown; lanes, generation: of its PCIe slot,
    0 if unknown; uuid: as CUDA_VISIBLE_DEVICES may name it, "" if unknown."""

    index: int
    name: str
    bus: str
    place: tuple[str, ...] = ()
    numa: int = -1
    generation: int = 0
    lanes: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface with hardware behind it. mbit: its speed, 0 if unknown; rdma: its name as an RDMA device, or nothing."""

    name: str
    bus: str
    place: tuple[str, ...] = ()
    numa: int = -1
    mbit: int = 0
    up: bool = True
    rdma: str = ""


@dataclass(frozen=True)
class Topology:
    """numa, sockets: cores of each NUMA node and of each CPU package, by number; paths: as ``nvidia-smi topo -m`` says, by the names of two devices;
    notes: what could not be found out, and why, a line each."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numa: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    sockets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    paths: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def gpu(self, entry: str) -> Gpu | None:
        """The GPU that an entry of CUDA_VISIBLE_DEVICES names, by its index or by its UUID or the beginning of it; None if it names none, or several."""
        if entry.isdecimal():
            named = [gpu for gpu in self.gpus if gpu.index == int(entry)]
        else:
            named = [gpu for gpu in self.gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        return named[0] if len(named) == 1 else None

    def of_ranks(self, gpus: Mapping[int, Gpu]) -> Topology:
        """This machine with some of its GPUs alone, each with another index: that of the local rank whose it is."""
        labels = {_label(gpu): "" for gpu in self.gpus} | {_label(gpu): f"GPU{rank}" for rank, gpu in gpus.items()}
        ends = {(labels.get(one, one), labels.get(other, other)): path for (one, other), path in self.paths.items()}
        paths = {pair: path for pair, path in ends.items() if all(pair)}
        return replace(self, gpus=tuple(replace(gpus[rank], index=rank) for rank in sorted(gpus)), paths=paths)

    def path(self, one: Gpu | Nic, other: Gpu | Nic) -> str:
        """The PCIe path between two devices, nearest of PATHS; "" if unknown. NVLinks do not count."""
        if one == other:
            return "X"
        told = self.paths.get((_label(one), _label(other)), "")
        if told in PATHS:
            return told
        return between(one, other) if one.place and other.place else ""

    def nvlinks(self, one: Gpu, other: Gpu) -> int:
        """How many NVLinks there are between two GPUs."""
        found = _NVLINK.match(self.paths.get((_label(one), _label(other)), ""))
        return int(found[1]) if found else 0

    @property
    def nvlinks_of_a_gpu(self) -> int:
        """NVLinks of the GPU that has the fewest; 0 unless NVLinks connect all GPUs, if need be by way of others."""
        counts = [[self.nvlinks(one, other) for other in self.gpus if other != one] for one in self.gpus]
        if len(counts) < 2 or len(self._groups(lambda one, other: self.nvlinks(one, other) > 0)) > 1:
            return 0
        # Behind NVSwitches each pair is told with all links of a GPU.
        return min(sum(row) if sum(row) <= MOST_NVLINKS else max(row) for row in counts)

    def switch_groups(self, size: int = 0) -> tuple[tuple[int, ...], ...]:
        """Indices of the GPUs behind each PCIe switch. size: BYTEPS_PCIE_SWITCH_SIZE, by which GPUs are grouped in their order instead. Raises UsageError
        for a size that does not divide them."""
        indices = [gpu.index for gpu in self.gpus]
        if size:
            if size < 1 or len(indices) % size:
                raise UsageError(
                    f"BYTEPS_PCIE_SWITCH_SIZE={size}: it does not divide the {len(indices)} GPU(s) of this machine; set how many are behind a switch"
                )
            return tuple(tuple(indices[first : first + size]) for first in range(0, len(indices), size))
        return self._groups(lambda one, other: self.path(one, other) in ("PIX", "PXB"))

    def _groups(self, near: Callable[[Gpu, Gpu], bool]) -> tuple[tuple[int, ...], ...]:
        """Groups of indices of GPUs that are near each other, directly or through others."""
        groups: list[list[Gpu]] = []
        for gpu in self.gpus:
            joined = [group for group in groups if any(near(gpu, other) for other in group)]
            groups = [*(group for group in groups if group not in joined), [*(other for group in joined for other in group), gpu]]
        return tuple(sorted(tuple(sorted(gpu.index for gpu in group)) for group in groups))

    def nearest_nic(self) -> dict[int, Nic]:
        """By the index of each GPU, its nearest interface; of several as near, one that has the fewest GPUs so far. Interfaces that are down count
        only if all are."""
        usable = [nic for nic in self.nics if nic.up] or list(self.nics)
        gpus = dict.fromkeys((nic.name for nic in usable), 0)
        found = {}
        for gpu in self.gpus if usable else ():
            nearest = min(usable, key=lambda nic: (_rank(self.path(gpu, nic)), gpus[nic.name], usable.index(nic)))
            gpus[nearest.name] += 1
            found[gpu.index] = nearest
        return found

    def reduce_roots(self, size: int = 0) -> tuple[int, ...]:
        """With NVLink, the GPUs that share no PCIe switch with an interface that is in use: reduced there, gradients cross the network's switch once
        (BYTEPS_REDUCE_ROOTS). Nothing where there is no NVLink, or an interface behind every switch."""
        if not self.nvlinks_of_a_gpu:
            return ()
        used = set(self.nearest_nic().values())
        shared = {gpu.index for gpu in self.gpus for nic in used if self.path(gpu, nic) in ("PIX", "PXB")}
        busy = {index for group in self.switch_groups(size) if shared.intersection(group) for index in group}
        away = tuple(gpu.index for gpu in self.gpus if gpu.index not in busy)
        return away if busy else ()

    @property
    def intra_gbps(self) -> float:
        """The rate at which each GPU can send to the machine's other GPUs, Gbit/s one way; 0 if unknown."""
        return self.nvlinks_of_a_gpu * NVLINK_GBPS or (self.host_gbps if len(self.gpus) > 1 else 0.0)

    @property
    def host_gbps(self) -> float:
        """The rate between a GPU and its host's memory, Gbit/s one way, of the slowest GPU; 0 if unknown."""
        rates = [PCIE_LANE_GBPS.get(gpu.generation, 0.0) * gpu.lanes * PCIE_ACHIEVED for gpu in self.gpus]
        return round(min(rates), 1) if rates else 0.0

    def to_json(self, switch_size: int = 0) -> dict[str, Any]:
        nearest = self.nearest_nic()
        groups, roots = self.switch_groups(switch_size), self.reduce_roots(switch_size)
        return {
            "gpus": [
                {
                    "index": gpu.index, "name": gpu.name, "bus": gpu.bus, "numa": gpu.numa, "pcie": [gpu.generation, gpu.lanes],
                    "nic": nearest[gpu.index].name if gpu.index in nearest else None,
                    "paths": {str(other.index): self._link(gpu, other) for other in self.gpus if other != gpu},
                }
                for gpu in self.gpus
            ],
            "nics": [
                {"name": nic.name, "bus": nic.bus, "numa": nic.numa, "mbit": nic.mbit, "up": nic.up, "rdma": nic.rdma} for nic in self.nics
            ],
            "switch_groups": [list(group) for group in groups],
            "reduce_roots": list(roots),
            "numa_nodes": {str(node): list(cores) for node, cores in self.numa.items()},
            "sockets": {str(socket): list(cores) for socket, cores in self.sockets.items()},
            "notes": list(self.notes),
        }  # fmt: skip

    def _link(self, one: Gpu, other: Gpu) -> str:
        links = self.nvlinks(one, other)
        return f"NV{links}" if links else self.path(one, other) or "unknown"


def between(one: Gpu | Nic, other: Gpu | Nic) -> str:
    """The PCIe path between two devices by the bridges above them."""
    if one.place[0] != other.place[0]:
        return "NODE" if one.numa == other.numa >= 0 else "SYS"
    common = next(
        (at for at, (a, b) in enumerate(zip(one.place, other.place, strict=False)) if a != b), min(len(one.place), len(other.place))
    )
    if common < 2:
        return "PHB"  # different root ports of one host bridge
    return "PIX" if max(len(one.place), len(other.place)) - common <= 1 else "PXB"


def _rank(path: str) -> int:
    return PATHS.index(path) if path in PATHS else len(PATHS)


def _label(device: Gpu | Nic) -> str:
    return f"GPU{device.index}" if isinstance(device, Gpu) else device.rdma or device.name


def cores_text(cores: Sequence[int]) -> str:
    """Cores as Linux lists them: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
