"""Machines to detect: /sys as a tree of files beside what nvidia-smi printed (``recorded/``), shaped like those of real machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psgc.errors import UsageError

RECORDED: Final = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Device:
    """path: below /sys/devices, of bridges and the device; net, rdma: names of a network interface on it."""

    path: str
    numa: int = 0
    net: str = ""
    rdma: str = ""
    mbit: int = 100_000
    up: bool = True
    gpu: bool = False


def tree(root: Path, devices: list[Device], cores: Mapping[int, str], sockets: int = 1) -> Path:
    """A folder like /sys. cores: of each NUMA node, as Linux lists them."""
    for device in devices:
        folder = root / "devices" / device.path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{device.numa}\n")
        (folder / "class").write_text("0x030200\n" if device.gpu else "0x020000\n")
        (folder / "vendor").write_text("0x10de\n" if device.gpu else "0x15b3\n")
        (folder / "device").write_text("0x20b0\n")
        (folder / "max_link_width").write_text("16\n")
        link = root / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        if device.net:
            interface = root / "class/net" / device.net
            interface.mkdir(parents=True)
            (interface / "device").symlink_to(folder)
            (interface / "speed").write_text(f"{device.mbit if device.up else -1}\n")
            (interface / "operstate").write_text("up\n" if device.up else "down\n")
        if device.rdma:
            (folder / "infiniband" / device.rdma).mkdir(parents=True)
    (root / "class/net/lo").mkdir(parents=True, exist_ok=True)
    for node, text in cores.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    for core in range(4 * sockets):
        folder = root / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 4}\n")
    return root


def asking(name: str) -> Callable[[tuple[str, ...]], str]:
    """nvidia-smi on the recorded machine of that name."""

    def ask(arguments: tuple[str, ...]) -> str:
        kind = "topo" if arguments[:2] == ("topo", "-m") else "gpus" if arguments[0].startswith("--query-gpu=") else ""
        if not kind:
            raise UsageError(f"nvidia-smi {arguments[0]}: not recorded")
        return (RECORDED / f"{name}.{kind}").read_text()

    return ask


def switch(root_bus: str, port: str, bus: str, *devices: str) -> list[str]:
    """Paths of devices behind one switch: a root port, the switch's port up, and a port down for each."""
    up = f"pci{root_bus}/{root_bus}:{port}.0/{bus}:00.0"
    return [f"{up}/{bus}:{4 + number:02x}.0/{device}" for number, device in enumerate(devices)]


def dgx1(root: Path) -> Path:
    """Two GPUs and an interface behind each of four switches, two switches a socket."""
    devices = []
    for number, (host, port, bus, gpus) in enumerate(
        (("0000:00", "02", "0000:04", ("06", "07")), ("0000:00", "03", "0000:08", ("0a", "0b")),
         ("0000:80", "02", "0000:83", ("85", "86")), ("0000:80", "03", "0000:87", ("89", "8a")))
    ):  # fmt: skip
        paths = switch(host, port, bus, *(f"0000:{gpu}:00.0" for gpu in gpus), f"0000:{int(bus[5:], 16) + 1:02x}:00.0")
        devices += [Device(path, number // 2, gpu=True) for path in paths[:2]]
        devices.append(Device(paths[2], number // 2, net=f"ib{number}", rdma=f"mlx5_{(0, 1, 2, 3)[number]}"))
    return tree(root, devices, {0: "0-19,40-59", 1: "20-39,60-79"}, sockets=2)


def nvlink_4(root: Path) -> Path:
    """Four GPUs behind two switches, the only interface behind the first."""
    first = switch("0000:17", "00", "0000:18", "0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0")
    second = switch("0000:17", "02", "0000:3a", "0000:3d:00.0", "0000:3e:00.0")
    devices = [Device(path, gpu=True) for path in (*first[:2], *second)]
    return tree(root, [*devices, Device(first[2], net="ens1f0", rdma="mlx5_0")], {0: "0-31"})


def pcie_4(root: Path) -> Path:
    """Four GPUs behind two switches of two host bridges, an Ethernet card without RDMA behind the second and one that is down behind the first."""
    first = switch("0000:3a", "00", "0000:39", "0000:3b:00.0", "0000:3c:00.0", "0000:3d:00.0")
    second = switch("0000:5d", "00", "0000:5c", "0000:5e:00.0", "0000:5f:00.0", "0000:60:00.0")
    devices = [Device(path, gpu=True) for path in (*first[:2], *second[:2])]
    cards = [Device(first[2], net="eno1", up=False), Device(second[2], net="eno2", mbit=25_000)]
    return tree(root, [*devices, *cards], {0: "0-23"})
