"""Where memory lies: a device's NUMA node from recorded trees of /sys, and what the kernel is asked for."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import pytest

from psgc.transport.memory import numa
from tests.topology.trees import Device, tree

NEAR, FAR, SILENT = "0000:07:00.0", "0000:c7:00.0", "0000:d8:00.0"


def test_a_devices_node_is_what_sysfs_says(tmp_path: Path) -> None:
    devices = [Device(f"pci{bus[:7]}/{bus}", node, gpu=True) for bus, node in ((NEAR, 0), (FAR, 1), (SILENT, -1))]
    two = tree(tmp_path / "two", devices, {0: "0-3", 1: "4-7"}, sockets=2)
    assert [numa.node_of(bus, two) for bus in (NEAR, FAR, SILENT)] == [0, 1, None]
    assert [numa.node_of(bus, two) for bus in ("0000:99:00.0", "", "../..", "cpu")] == [None] * 4
    one = tree(tmp_path / "one", devices[:1], {0: "0-3"})
    assert numa.node_of(NEAR, one) is None, "there is no choice on a machine of one node"
    assert numa.bus_of(0, 0xC7, 0) == FAR and numa.bus_of(0, -1, 0) == ""


class Kernel:
    """Answers like the two system calls. refuses: set_mempolicy, as seccomp does in containers; policy: the thread's own."""

    def __init__(self, refuses: bool = False, policy: int = numa.DEFAULT) -> None:
        self.refuses, self.policy, self.said = refuses, policy, list[Any]()

    def __call__(self, number: int, *arguments: Any) -> int:
        set_policy, get_policy = numa._CALLS["x86_64"]
        if number == get_policy:
            arguments[0]._obj.value = self.policy
            return 0
        assert number == set_policy
        if self.refuses:
            return -1
        policy, mask, _ = arguments
        self.said.append((policy, None if mask is None else [node for node in range(128) if mask[node // 64] >> node % 64 & 1]))
        return 0


def test_memory_is_asked_for_on_the_node_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    kernel = Kernel()
    seen: list[Any] = []
    with contextlib.suppress(MemoryError), numa.memory_on(65, kernel) as placed:
        seen = [placed, *kernel.said]
        raise MemoryError
    assert seen == [True, (numa.PREFERRED, [65])]
    assert kernel.said[1:] == [(numa.DEFAULT, None)]


def test_nothing_is_changed_where_the_kernel_or_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    for kernel, node in ((Kernel(refuses=True), 1), (Kernel(policy=2), 1), (Kernel(), None)):
        with numa.memory_on(node, kernel) as placed:
            assert not placed
        assert kernel.said == []
    assert numa.may_place_memory(Kernel()) and not numa.may_place_memory(Kernel(refuses=True))
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert not numa.may_place_memory(Kernel())


def test_this_machines_kernel_answers_either_way_and_the_policy_is_as_before() -> None:
    with numa.memory_on(0):
        assert bytearray(1 << 20)
    policy = ctypes.c_int(-1)
    places = numa._CALLS.get(numa.platform.machine())
    if places is not None and numa._syscall()(places[1], ctypes.byref(policy), None, 0, None, 0) == 0:
        assert policy.value == numa.DEFAULT or not numa.may_place_memory()


def test_a_gpus_node_is_found_by_what_torch_says_of_it(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from psgc.torch.device.cuda import numa_node

    root = tree(tmp_path, [Device(f"pci0000:c7/{FAR}", 1, gpu=True)], {0: "0-3", 1: "4-7"}, sockets=2)
    assert numa_node(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC7, pci_device_id=0), root) == 1
    assert numa_node(SimpleNamespace(pci_bus_id=0xC7), root) is None


def test_doctor_says_where_memory_cannot_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.launch.topology import Gpu, Topology
    from psgc.launch.verbs import doctor

    gpus = (Gpu(0, "NVIDIA A100", FAR, (), 1),)
    two, one = Topology(gpus, numa={0: (0,), 1: (1,)}), Topology(gpus, numa={0: (0,)})
    monkeypatch.setattr(numa, "may_place_memory", lambda: False)
    assert "set_mempolicy" in doctor._placing(two) and doctor._placing(one) == ""
    monkeypatch.setattr(numa, "may_place_memory", lambda: True)
    assert doctor._placing(two) == ""
