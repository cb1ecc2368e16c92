"""A machine's topology: from /sys and nvidia-smi's tables, recorded ones of real shapes and hostile ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import ConfigError, UsageError
from psgc.launch.job.cores import _nodes_of_gpus
from psgc.launch.job.run import run_job
from psgc.launch.profiling.measure import Request, cluster_of
from psgc.launch.topology import Gpu, Nic, Topology, as_detected, detect, nvidia, switch_size, sysfs, told
from psgc.launch.topology.describe import rows
from psgc.launch.topology.devices import gpus_of_ranks
from psgc.launch.topology.interfaces import addresses, place_of
from psgc.launch.topology.machine import between, cores_text
from psgc.plan.inputs.cluster import Link, load_cluster
from psgc.plan.inputs.profile import Profile
from tests.topology.trees import Device, asking, dgx1, nvlink_4, pcie_4, switch, tree

NOWHERE = Path("/nonexistent")


def test_eight_gpus_in_a_mesh_of_nvlinks_with_an_interface_behind_each_switch(tmp_path: Path) -> None:
    found = detect(dgx1(tmp_path), asking("dgx1-v100"))
    assert not found.notes and [gpu.numa for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.nvlinks_of_a_gpu == 6, "each has six, one or two to each of four others"
    assert found.intra_gbps == 1200, "150 GB/s one way"
    assert found.switch_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    nearest = found.nearest_nic()
    assert [nearest[gpu].name for gpu in range(8)] == ["ib0", "ib0", "ib1", "ib1", "ib2", "ib2", "ib3", "ib3"]
    assert found.reduce_roots() == (), "every switch has an interface"
    assert found.sockets == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    assert cores_text(found.numa[1]) == "20-39,60-79"
    assert Topology(sysfs.gpus(tmp_path)).switch_groups() == found.switch_groups(), "the PCI tree alone says so, too"


def test_roots_of_reductions_are_off_the_only_interfaces_switch(tmp_path: Path) -> None:
    """The picture in Jiang et al. 2020: BYTEPS_REDUCE_ROOTS=2,3."""
    found = detect(nvlink_4(tmp_path), asking("nvlink-4-one-nic"))
    assert found.switch_groups() == ((0, 1), (2, 3)) and found.reduce_roots() == (2, 3)
    assert found.switch_groups(4) == ((0, 1, 2, 3),) and found.reduce_roots(4) == (), (
        "BYTEPS_PCIE_SWITCH_SIZE=4: one group, with the interface"
    )
    assert found.to_json()["gpus"][0]["paths"] == {"1": "NV2", "2": "NV2", "3": "NV2"}
    with pytest.raises(UsageError, match=r"BYTEPS_PCIE_SWITCH_SIZE=3: it does not divide the 4 GPU\(s\)"):
        found.switch_groups(3)
    for text, size in (("", 0), ("2", 2)):
        assert switch_size({"BYTEPS_PCIE_SWITCH_SIZE": text}, found) == size
    with pytest.raises(UsageError, match="BYTEPS_PCIE_SWITCH_SIZE='two' is wrong"):
        switch_size({"BYTEPS_PCIE_SWITCH_SIZE": "two"}, found)


def test_nvswitches_give_each_gpu_all_its_links() -> None:
    a100, h100 = (detect(NOWHERE, asking(name)) for name in ("dgx-a100", "dgx-h100"))
    assert (a100.nvlinks_of_a_gpu, a100.intra_gbps, h100.nvlinks_of_a_gpu, h100.intra_gbps) == (12, 2400, 18, 3600)
    assert a100.gpus[0].bus == "0000:07:00.0" and h100.gpus[7].name == "NVIDIA H100 80GB HBM3"
    assert h100.paths["GPU0", "mlx5_0"] == "PXB" and h100.paths["GPU1", "mlx5_3"] == "PXB", "the legend names NIC0, NIC1, ..."
    nics = tuple(Nic(f"ib{number}", "", rdma=name) for number, name in enumerate(("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_1")))
    nearest = replace(h100, nics=nics).nearest_nic()
    assert [nearest[gpu].rdma for gpu in range(4)] == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"]
    assert h100.host_gbps == pytest.approx(31.5 * 16 * 0.8)


def test_gpus_behind_pcie_switches(tmp_path: Path) -> None:
    four = detect(pcie_4(tmp_path), asking("pcie-4"))
    assert four.switch_groups() == ((0, 1), (2, 3)) and four.nvlinks_of_a_gpu == 0 and four.reduce_roots() == ()
    assert [four.nearest_nic()[gpu].name for gpu in range(4)] == ["eno2"] * 4, "the one that is nearer to two of them is down"
    assert [(nic.name, nic.mbit, nic.up) for nic in four.nics] == [("eno1", 0, False), ("eno2", 25_000, True)]
    assert (four.intra_gbps, four.host_gbps) == (100.9, 100.9), "PCIe 3.0 x16, four fifths of it"
    eight = detect(NOWHERE, asking("pcie-8"))
    assert eight.switch_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    near = replace(eight, nics=(Nic("a", "", rdma="mlx5_0"), Nic("b", "", rdma="mlx5_1"))).nearest_nic()
    assert [near[gpu].name for gpu in range(8)] == ["a"] * 4 + ["b"] * 4


def test_several_interfaces_as_near_are_taken_in_turn_and_pairs_of_nvlinks_make_no_whole() -> None:
    gpus = tuple(Gpu(index, "g", f"0000:0{index}:00.0") for index in range(4))
    nics = tuple(Nic(name, "") for name in ("x", "y"))
    paths = {("GPU0", "GPU1"): "NV4", ("GPU1", "GPU0"): "NV4", ("GPU2", "GPU3"): "NV4", ("GPU3", "GPU2"): "NV4"}
    found = Topology(gpus, nics, paths=paths)
    assert [nic.name for nic in found.nearest_nic().values()] == ["x", "y", "x", "y"]
    assert found.nvlinks_of_a_gpu == 0, "GPU 0 reaches GPU 2 over PCIe only"


def test_paths_on_pci_are_what_bridges_lie_between() -> None:
    def at(path: str, numa: int = 0) -> Nic:
        return Nic(path, path.rpartition("/")[2], tuple(path.split("/")[:-1]), numa)

    one, same = switch("0000:00", "01", "0000:01", "0000:06:00.0", "0000:07:00.0")
    other = switch("0000:00", "02", "0000:11", "0000:16:00.0")[0]
    behind = f"{one.rpartition('/')[0]}/0000:20:00.0/0000:21:00.0/0000:22:00.0"
    away = switch("0000:80", "01", "0000:81", "0000:86:00.0")[0]
    expected = ((same, 0, "PIX"), (behind, 0, "PXB"), (other, 0, "PHB"), (away, 0, "NODE"), (away, 1, "SYS"))
    for path, numa, word in expected:
        assert between(at(one), at(path, numa)) == between(at(path, numa), at(one)) == word


def test_a_machine_without_gpus_or_a_readable_sys_has_none_and_nothing_fails(tmp_path: Path) -> None:
    empty = detect(NOWHERE, _no_smi)
    assert empty.gpus == () and empty.nics == () and empty.numa == {}
    here = detect(tree(tmp_path, [Device("pci0000:00/0000:00:03.0", -1, net="eth0", mbit=0)], {0: "0-1"}), _no_smi)
    assert [(nic.name, nic.numa, nic.mbit) for nic in here.nics] == [("eth0", 0, 0)], "one NUMA node: the card is on it"
    assert here.gpus == () and here.notes == ("nvidia-smi --query-gpu=index,name: broken",)
    assert rows(here)[0] == ["GPUs", "none"]


def _no_smi(arguments: tuple[str, ...]) -> str:
    raise UsageError(f"nvidia-smi {arguments[0][:22]}: broken")


def test_odd_tables_give_one_line_that_says_what_is_odd() -> None:
    good = asking("pcie-4")(("topo", "-m"))
    for text, said in (
        ("", "expected a line of device names that begins with GPU0, got 'nothing'"),
        ("NVIDIA-SMI has failed because it could not communicate with the driver", "got 'NVIDIA-SMI has failed"),
        (good.replace("NODE", "FAST"), "expected a path .* from GPU0 to GPU2, got 'FAST'"),
        (good.replace("GPU3\tNODE", "GPU3\tPIX"), "expected the same path from"),
        ("\n".join(line for line in good.splitlines() if not line.startswith("GPU2")), "expected a row for each of GPU0, GPU1, GPU2, GPU3"),
        (good.replace("\tGPU0\tGPU1", "\tGPU0\tGPU0"), "expected each device once"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU0\t X \tPIX\n", "expected one row of 2 paths for GPU0"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            nvidia.read_paths(text)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    for text in (
        "no devices",
        "0, T4",
        "x, T4, 00000000:3B:00.0, 3, 16, u",
        "0, T4, 3B, 3, 16, u",
        "0, A, 0:3B:00.0, 3, 16, u",
        "0, T4, 00000000:3B:00.0, 3, 16",
    ):
        with pytest.raises(UsageError, match="nvidia-smi --query-gpu: expected index, name"):
            nvidia.read_gpus(text)
    with pytest.raises(UsageError, match="some of them twice"):
        nvidia.read_gpus("0, A, 00000000:3B:00.0, 3, 16, GPU-1\n0, B, 00000000:3C:00.0, 3, 16, GPU-2")
    (virtual,) = nvidia.read_gpus('0, "A, 40 GB", 00000000:3B:00.0, [N/A], [N/A], [N/A]')
    assert (virtual.name, virtual.generation, virtual.lanes, virtual.uuid) == ("A, 40 GB", 0, 0, "")
    odd = detect(NOWHERE, lambda arguments: asking("pcie-4")(arguments) if arguments[0] != "topo" else "garbage")
    assert len(odd.gpus) == 4 and "psgc goes by the PCI tree alone" in odd.notes[0]


@given(st.text(max_size=300), st.integers(0, 700), st.text(max_size=3))
def test_any_text_is_read_or_refused(text: str, at: int, changed: str) -> None:
    table = asking("pcie-4")(("topo", "-m"))
    for hostile in (text, table[:at] + changed + table[at + 1 :]):
        found = detect(NOWHERE, lambda arguments, said=hostile: said if arguments[0] == "topo" else asking("pcie-4")(arguments))  # type: ignore[misc]
        assert len(found.gpus) == 4 and all("\n" not in note for note in found.notes)
        found = detect(NOWHERE, lambda arguments, said=hostile: said)  # type: ignore[misc]
        assert all("\n" not in note for note in found.notes)
    assert all(0 <= core <= sysfs.MOST_CORES for core in sysfs.read_cores(text))


def test_the_cluster_file_of_a_machine_with_gpus_says_what_was_detected_and_what_assumed(tmp_path: Path) -> None:
    request = Request("gpt2", "v100", (), 4, 1, 20, (), None, False, Link(25.0, 30.0))
    profile = Profile("", (), "a machine", "now", "measured")
    cluster, comments = cluster_of(request, profile, detect(nvlink_4(tmp_path / "sys"), asking("nvlink-4-one-nic")))
    text = cluster.to_toml(comments)
    assert "gpus_per_node = 4  # detected\n" in text and "[inter]  # as given, less frames' headers: TCP carries 0.956 of a link\n" in text
    assert "[intra]  # gbps detected (NVLink, 6 a GPU; its rate by data sheet), latency assumed\n" in text
    assert "[host]  # gbps detected (PCIe 3 x16, four fifths of its rate), latency assumed\n" in text
    (tmp_path / "cluster.toml").write_text(text)
    assert load_cluster(str(tmp_path / "cluster.toml")) == cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.intra, cluster.host) == (
        4,
        4,
        Link(1200, 8, "NVLink, 6 a GPU"),
        Link(100.9, 10, "PCIe"),
    )
    plain, comments = cluster_of(request, profile, Topology())
    assert (plain.gpus_per_node, plain.host, plain.intra) == (1, None, Link(23.91, 30.0)) and "gpus_per_node" not in comments
    assert "[intra]  # assumed: as between nodes" in plain.to_toml(comments)


def test_what_was_found_is_a_table_for_people(tmp_path: Path) -> None:
    table = dict(rows(detect(nvlink_4(tmp_path), asking("nvlink-4-one-nic"))))
    assert table["GPUs"] == "4 x Tesla V100-SXM2-16GB; NVLink, 6 a GPU"
    assert table["GPU 3"] == "0000:3e:00.0, NUMA node 0, PCIe 3 x16, NV2:3, nearest interface ens1f0 (PHB)"
    assert table["PCIe switches"] == "0 1; 2 3"
    assert table["reduction roots"] == "2 3 (off the switches of network interfaces), which BYTEPS_REDUCE_ROOTS=auto takes"
    assert table["interface ens1f0"] == "100 Gbit/s, 0000:1c:00.0, NUMA node 0, RDMA device mlx5_0"
    assert table["NUMA node 0"] == "cores 0-31"


def test_auto_is_what_the_machine_has_for_its_launchers_and_for_cluster_files(tmp_path: Path) -> None:
    nvlink, pcie = detect(nvlink_4(tmp_path / "a"), asking("nvlink-4-one-nic")), detect(pcie_4(tmp_path / "b"), asking("pcie-4"))
    assert (as_detected(nvlink), as_detected(pcie), as_detected(Topology())) == (((2, 3), 0), ((), 2), ((), 0))
    both = {"BYTEPS_REDUCE_ROOTS": "auto", "BYTEPS_PCIE_SWITCH_SIZE": "auto"}
    assert told(both, 4, lambda: nvlink) == {"BYTEPS_REDUCE_ROOTS": "2,3", "BYTEPS_PCIE_SWITCH_SIZE": ""}
    assert told(both, 4, lambda: pcie) == {"BYTEPS_REDUCE_ROOTS": "", "BYTEPS_PCIE_SWITCH_SIZE": "2"}
    assert told({"BYTEPS_REDUCE_ROOTS": "1"}, 4, lambda: pytest.fail("nothing is to be detected")) == {}
    with pytest.raises(UsageError, match=r"BYTEPS_REDUCE_ROOTS=auto .* there are 2 worker\(s\) and 4 GPU\(s\)"):
        told(both, 2, lambda: nvlink)
    assert ["shards of a node's sums", "on local ranks 2 3 alone (BYTEPS_REDUCE_ROOTS)"] in rows(Topology(), 0, (2, 3))
    assert any("of each 2 local ranks first" in text for _, text in rows(pcie, 2))


def by_uuid(machine: Topology, *indices: int) -> str:
    return ",".join(machine.gpus[index].uuid for index in indices)


def test_local_ranks_have_the_gpus_that_are_listed_for_them() -> None:
    """nvidia-smi lists all of a machine's GPUs, whatever CUDA_VISIBLE_DEVICES has."""
    machine = detect(NOWHERE, asking("pcie-8"))
    everything = {rank: rank for rank in range(8)}
    own, listed = {"PSGC_CUDA_DEVICES": "own"}, {"PSGC_CUDA_DEVICES": "listed"}
    for env, found in (
        ({}, everything),
        (own, everything),
        ({"CUDA_VISIBLE_DEVICES": "4, 5"}, {0: 4, 1: 5}),
        ({"CUDA_VISIBLE_DEVICES": "5,2"}, {0: 5, 1: 2}),
        ({"NVIDIA_VISIBLE_DEVICES": "4,5"}, everything),  # workers see all of them, and take those of their local ranks
        ({**own, "NVIDIA_VISIBLE_DEVICES": "4,5"}, {0: 4, 1: 5}),
        ({**listed, "NVIDIA_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, {0: 4, 1: 5}),
        ({"NVIDIA_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, {0: 0, 1: 1}),
        ({"NVIDIA_VISIBLE_DEVICES": "all", **own}, everything),
        ({"CUDA_VISIBLE_DEVICES": by_uuid(machine, 6, 1)}, {0: 6, 1: 1}),
        ({"CUDA_VISIBLE_DEVICES": by_uuid(machine, 6)[:12]}, {0: 6}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-4a7f-1,4,9,GPU-nosuch,GPU-,-1"}, {1: 4}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
    ):
        assert {rank: gpu.index for rank, gpu in gpus_of_ranks(env, machine).items()} == found, env


def test_interfaces_cores_and_roots_are_those_of_the_listed_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgc.launch.topology.interfaces.interface_address", lambda name, _: name)
    eight = replace(detect(NOWHERE, asking("pcie-8")), nics=(Nic("a", "", rdma="mlx5_0"), Nic("b", "", rdma="mlx5_1")))
    two = {"CUDA_VISIBLE_DEVICES": "4,5", "PSGC_INTERFACES": "auto"}
    assert [place_of(two, number, lambda: eight)["DMLC_NODE_HOST"] for number in range(3)] == ["b", "b", "a"], "the third has no GPU"
    mixed = {"CUDA_VISIBLE_DEVICES": "7,0", "PSGC_INTERFACES": "auto"}
    assert [place_of(mixed, number, lambda: eight)["DMLC_NODE_HOST"] for number in range(2)] == ["b", "a"]

    both = {"BYTEPS_REDUCE_ROOTS": "auto", "BYTEPS_PCIE_SWITCH_SIZE": "auto"}
    assert told({**both, "CUDA_VISIBLE_DEVICES": "2,3,6,7"}, 4, lambda: eight) == {
        "BYTEPS_REDUCE_ROOTS": "",
        "BYTEPS_PCIE_SWITCH_SIZE": "2",
    }
    assert told({**both, "CUDA_VISIBLE_DEVICES": "2,6,3,7"}, 4, lambda: eight)["BYTEPS_PCIE_SWITCH_SIZE"] == "", (
        "not in the order of switches"
    )
    nvlink = detect(nvlink_4(tmp_path / "a"), asking("nvlink-4-one-nic"))
    assert told({**both, "CUDA_VISIBLE_DEVICES": "3,1"}, 2, lambda: nvlink)["BYTEPS_REDUCE_ROOTS"] == "0", (
        "GPU 1 is behind the interface's switch"
    )
    with pytest.raises(UsageError, match=r"there are 2 worker\(s\) and 1 GPU\(s\) that can be told"):
        told({**both, "CUDA_VISIBLE_DEVICES": "3,MIG-1"}, 2, lambda: nvlink)

    machine = detect(dgx1(tmp_path / "b"), asking("dgx1-v100"))
    assert _nodes_of_gpus({"CUDA_VISIBLE_DEVICES": "4,0"}, machine, 3) == [1, 0, -1]
    assert _nodes_of_gpus({"NVIDIA_VISIBLE_DEVICES": "4,5", "PSGC_CUDA_DEVICES": "own"}, machine, 2) == [1, 1]


def test_psgc_run_refuses_interfaces_because_all_its_processes_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSGC_INTERFACES", "lo")
    with pytest.raises(UsageError, match=r"psgc run: PSGC_INTERFACES=lo: all processes .* or start the job with psgc-launch"):
        run_job(["true"])


def test_local_ranks_and_servers_take_the_named_interfaces_in_turn() -> None:
    env = {"PSGC_INTERFACES": "127.0.0.2, 127.0.0.3"}
    assert [place_of(env, number)["DMLC_NODE_HOST"] for number in range(3)] == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]
    assert place_of({**env, "DMLC_NODE_HOST": "10.0.0.1"}, 0) == {} == place_of({}, 1)
    assert addresses({"PSGC_INTERFACES": "lo"}) == ("127.0.0.1",)
    for text, said in (
        ("192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("lo,eth99", "no interface 'eth99' with an IPv4 address; .* has .*lo"),
    ):
        with pytest.raises(ConfigError, match=said):
            place_of({"PSGC_INTERFACES": text}, 0)
    one = (Nic("lo", "", up=True),)
    assert place_of({"PSGC_INTERFACES": "auto"}, 3, lambda: Topology(nics=one)) == {"DMLC_NODE_HOST": "127.0.0.1"}
    far = Topology(gpus=(Gpu(0, "g", "0000:07:00.0"),), nics=one)
    assert place_of({"PSGC_INTERFACES": "auto"}, 0, lambda: far) == {"DMLC_NODE_HOST": "127.0.0.1"}
    assert place_of({"PSGC_INTERFACES": "auto"}, 0, Topology) == {}
