"""How many cores a process counts: those that it may run on, and of a launcher's processes those that they share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from psgc.config import Config
from psgc.processes.cores import cores_of_node, usable_cores
from psgc.torch.auto.measuring import Measuring
from psgc.worker.threads import pool_threads

PARENT = os.getppid()


def may_run_on(monkeypatch: pytest.MonkeyPatch, own: set[int], launchers: set[int] | None) -> None:
    """Affinities of this process and of its parent; None: the parent cannot be asked."""

    def affinity(pid: int) -> set[int]:
        if pid == 0:
            return own
        if pid != PARENT or launchers is None:
            raise ProcessLookupError(pid)
        return launchers

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.parametrize(
    ("own", "launchers", "of_node"),
    [
        ({1, 2, 3, 4}, {1, 2, 3, 4}, 4),  # taskset, or a container's cpuset
        ({1, 2}, set(range(8)), 8),  # BYTEPS_VISIBLE_CPU_CORES, BYTEPS_NUMA_ON
        ({1, 2}, None, 2),
        ({1, 2}, {3}, 2),
    ],
)
def test_cores_are_those_that_an_affinity_leaves(
    own: set[int], launchers: set[int] | None, of_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run_on(monkeypatch, own, launchers)
    assert (usable_cores(), cores_of_node(launched=False)) == (len(own), len(own))
    assert cores_of_node(launched=True) == Measuring().cores(launched=True) == of_node


@pytest.mark.parametrize(
    ("own", "launchers", "local_size", "threads"),
    [
        (set(range(8)), set(range(8)), 4, 2),
        ({0, 1}, set(range(8)), 4, 2),  # its own two of eight: not half of them again
        ({0}, set(range(16)), 4, 1),
        (set(range(2)), set(range(2)), 4, 1),
    ],
)
def test_a_worker_has_as_many_threads_as_its_share_of_the_nodes_cores(
    own: set[int], launchers: set[int], local_size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run_on(monkeypatch, own, launchers)
    assert pool_threads(Config(local_size=local_size, launcher="3")) == threads
    assert pool_threads(Config(local_size=local_size, cpu_threads=7)) == 7


def test_a_process_that_was_given_one_core_counts_one() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nfrom psgc.processes.cores import usable_cores\nprint(usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "1"
