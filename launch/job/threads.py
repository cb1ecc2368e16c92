"""OpenMP settings of a worker: how many threads, and that idle threads sleep, because torch's and BLAS's threads share cores with psgc's
threads and with other workers. On two cores, two workers and a server, busy otherwise, a step took 48 ms with sleeping threads, 820 ms with spinning ones
(README's script, November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping

from psgc.processes.cores import usable_cores


def shared_cores(env: Mapping[str, str], workers: int, pinned: bool = False) -> dict[str, str]:
    """OMP_NUM_THREADS and OMP_WAIT_POLICY for ``workers`` processes on this machine, without those that the user has set. pinned: whether each process has
    separate cores."""
    wanted = {"OMP_WAIT_POLICY": "passive"}
    if workers > 1 and not pinned and not env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip():  # else OpenMP sees which cores it has
        wanted["OMP_NUM_THREADS"] = str(max(1, usable_cores() // workers))
    return {name: value for name, value in wanted.items() if not env.get(name, "").strip()}
