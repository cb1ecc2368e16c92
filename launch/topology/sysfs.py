"""Reads a tree like Linux's /sys: network interfaces, GPUs and where they are on PCI, NUMA nodes, CPU packages. Takes the tree's root."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from psgc.launch.topology.machine import Gpu, Nic

NVIDIA: Final = "0x10de"
DISPLAY: Final = "0x03"  # PCI's class of VGA and 3D controllers
MOST_CORES: Final = 1 << 16
_BUS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}$")


def place_of(root: Path, bus: str) -> tuple[str, ...]:
    """The host bridge and the bridges above a device, from the root; nothing if the tree does not have it."""
    device = root / "bus/pci/devices" / bus
    if not _BUS.match(bus) or not device.exists():
        return ()
    return _above(device.resolve())


def _above(device: Path) -> tuple[str, ...]:
    parts = device.parts
    first = next((at for at, part in enumerate(parts) if _ROOT.match(part)), None)
    return () if first is None else tuple(part for part in parts[first:-1] if _ROOT.match(part) or _BUS.match(part))


def numa_of(root: Path, bus: str) -> int:
    """A device's NUMA node; -1 if the machine does not say. A machine of one node has 0 everywhere."""
    value = _number(root / "bus/pci/devices" / bus / "numa_node")
    only = [node for node, _ in _numbered(root / "devices/system/node", "node")] == [0]
    if value is None or value < 0:
        return 0 if only else -1
    return value


def gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA's display controllers in the order of their addresses, for machines without nvidia-smi."""
    found: list[Gpu] = []
    for device in _entries(root / "bus/pci/devices"):
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAY):
            name = f"NVIDIA device {_text(device / 'device').removeprefix('0x')}"
            found.append(Gpu(len(found), name, device.name, place_of(root, device.name), numa_of(root, device.name), lanes=_lanes(device)))
    return tuple(found)


def _lanes(device: Path) -> int:
    value = _number(device / "max_link_width")
    return value if value is not None and 0 < value <= 32 else 0


def nics(root: Path) -> tuple[Nic, ...]:
    """Interfaces with hardware behind them, virtual functions and bridges left out. On virtual machines the hardware may not be on PCI."""
    found = []
    for interface in _entries(root / "class/net"):
        if not (interface / "device").exists():
            continue
        device = (interface / "device").resolve()
        above = (device, *device.parents)  # virtio's devices are below the PCI device
        pci = next((path for path in above if _BUS.match(path.name)), None)
        bus = "" if pci is None else pci.name
        speed = _number(interface / "speed") or 0
        rdma = [entry.name for entry in _entries(device / "infiniband")]
        found.append(
            Nic(
                interface.name, bus, () if pci is None else _above(pci), numa_of(root, bus) if bus else -1, speed if 0 < speed < 10_000_000 else 0,
                _text(interface / "operstate") in ("up", "unknown"), rdma[0] if rdma else "",
            )
        )  # fmt: skip
    return tuple(found)


def numa_nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """The cores of each NUMA node."""
    return {
        node: cores for node, folder in _numbered(root / "devices/system/node", "node") if (cores := read_cores(_text(folder / "cpulist")))
    }


def sockets(root: Path) -> dict[int, tuple[int, ...]]:
    """The cores of each CPU package."""
    packages: dict[int, list[int]] = {}
    for core, folder in _numbered(root / "devices/system/cpu", "cpu"):
        package = _number(folder / "topology/physical_package_id")
        if package is not None:
            packages.setdefault(max(package, 0), []).append(core)
    return {package: tuple(sorted(cores)) for package, cores in sorted(packages.items())}


def read_cores(text: str) -> tuple[int, ...]:
    """Cores from a list like 0-3,8; nothing for other text."""
    cores: list[int] = []
    for run in text.split(","):
        found = re.match(r"(\d{1,6})(?:-(\d{1,6}))?$", run.strip())
        if found is None or len(cores) > MOST_CORES:
            return ()
        cores += range(int(found[1]), min(int(found[2] or found[1]), MOST_CORES) + 1)
    return tuple(cores)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _numbered(folder: Path, word: str) -> Iterator[tuple[int, Path]]:
    """Entries like node0, node1 in the order of their numbers."""
    found = [(int(match[1]), entry) for entry in _entries(folder) if (match := re.match(rf"{word}(\d{{1,6}})$", entry.name))]
    return iter(sorted(found))


def _text(file: Path) -> str:
    try:
        return file.read_bytes()[:4096].decode(errors="replace").strip()
    except OSError:
        return ""  # some interfaces refuse to be asked for their speed while they are down


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if re.match(r"-?\d{1,12}$", text) else None
