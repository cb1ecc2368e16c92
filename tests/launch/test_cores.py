"""Local ranks stay on cores of their own, near their GPUs; each sees the devices that it is told to."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import ConfigError
from psgc.launch.job import cores
from psgc.launch.job.cores import allocate, cores_of_ranks, near_memory
from psgc.launch.topology import Gpu, Topology
from psgc.launch.topology.devices import seen_devices

# Two NUMA nodes of four physical cores; core n's other hardware thread is n + 8.
NUMA = {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}
SIBLINGS = {core: (core % 8, core % 8 + 8) for core in range(16)}


def test_ranks_share_the_physical_cores_of_their_gpus_nodes() -> None:
    assert allocate(NUMA, SIBLINGS, [1, 1, 0, 0], 4) == [[4, 5, 12, 13], [6, 7, 14, 15], [0, 1, 8, 9], [2, 3, 10, 11]]
    assert allocate(NUMA, SIBLINGS, [-1, -1], 2, multithreaded=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_quotas_and_excluded_cores_count_as_in_byteps() -> None:
    assert allocate(NUMA, SIBLINGS, [0, 0], 2, quota=1, multithreaded=False) == [[0], [1, 2, 3]], (
        "the last rank is the root: it gets the rest"
    )
    assert allocate(NUMA, SIBLINGS, [0, 0], 2, quota=1, root_quota=2, excluded={1}) == [[0, 8], [2, 3, 10, 11]]
    assert allocate(NUMA, SIBLINGS, [0, 0], 2, quota=1, root_quota=1, excluded={0, 8}) == [[1, 9], [2, 10]]
    with pytest.raises(ConfigError, match=r"no core is left for local rank 1 of 2; lower BYTEPS_NUMA_DEFAULT_QUOTA"):
        allocate({0: (0,)}, {}, [-1, -1], 2)


def test_every_rank_has_cores_that_no_other_has_and_of_one_node() -> None:
    for size in range(1, 9):
        found = allocate(NUMA, SIBLINGS, [-1] * size, size)
        taken = [core for own in found for core in own]
        assert len(taken) == len(set(taken)) and all(own and any(set(own) <= set(node) for node in NUMA.values()) for own in found)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Topology(gpus=(Gpu(0, "g", "", numa=1), Gpu(1, "g", "", numa=0)), numa=NUMA)
    monkeypatch.setattr(cores, "detect", lambda: found)
    monkeypatch.setattr(cores, "_siblings", lambda _: SIBLINGS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def test_the_environment_says_whether_and_how(machine: None) -> None:
    assert cores_of_ranks({}, 2) == [[], []]
    on = {"BYTEPS_NUMA_ON": "1", "BYTEPS_MULTITHREADED_CPU": "0", "BYTEPS_CPU_BLACKLIST": "4-5"}
    assert cores_of_ranks(on, 2) == [[6, 7], [0, 1, 2, 3]]
    assert cores_of_ranks({**on, "BYTEPS_VISIBLE_CPU_CORES": "1:2"}, 2) == [[1], [2]]
    for name, value in (("BYTEPS_NUMA_ON", "yes"), ("BYTEPS_NUMA_DEFAULT_QUOTA", "x"), ("BYTEPS_CPU_BLACKLIST", "x")):
        with pytest.raises(ConfigError, match=f"^{name}='{value}': expected "):
            cores_of_ranks({**on, name: value}, 2)


@pytest.mark.parametrize("works", [True, False])
def test_numactl_takes_memory_from_the_ranks_node_where_it_may(
    machine: None, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numactl = tmp_path / "numactl"
    numactl.write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
    numactl.chmod(numactl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert near_memory([[4, 5], [0, 4], []]) == [[str(numactl), "--preferred=1"] if works else [], [], []]


def test_each_worker_sees_the_devices_that_it_is_told_to() -> None:
    listed = {"NVIDIA_VISIBLE_DEVICES": "4, 5"}
    assert seen_devices(listed, 1) == {}
    assert seen_devices({**listed, "PSGC_CUDA_DEVICES": "listed"}, 1) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert seen_devices({**listed, "PSGC_CUDA_DEVICES": "own"}, 1) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert seen_devices({"PSGC_CUDA_DEVICES": "own"}, 1) == {"CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(ConfigError, match=r"local rank 2 has no device of its own among 4,5"):
        seen_devices({**listed, "PSGC_CUDA_DEVICES": "own"}, 2)
    with pytest.raises(ConfigError, match=r"expected one of inherited, listed, own"):
        seen_devices({"PSGC_CUDA_DEVICES": "mine"}, 0)


def test_a_launched_worker_is_told_its_device(launched: Any) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    env = {"DMLC_NUM_WORKER": "1", "NVIDIA_VISIBLE_DEVICES": "6,7", "PSGC_CUDA_DEVICES": "own", "PSGC_SILENCE_S": "60"}
    status, out, err = launched.end(launched.psgc_launch(sys.executable, "-c", code, **env))
    assert (status, sorted(out.splitlines())) == (0, ["[worker 0] 6", "[worker 1] 7"]), err
