"""The cores to which each local rank is pinned: those that BYTEPS_VISIBLE_CPU_CORES names, or, with BYTEPS_NUMA_ON=1, a share of one NUMA node.

``allocate`` is pure; the rest reads /sys.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from psgc.errors import ConfigError
from psgc.launch.topology import Topology, detect
from psgc.launch.topology.devices import gpus_of_ranks
from psgc.launch.topology.machine import cores_text
from psgc.launch.topology.sysfs import read_cores

SIBLINGS: Final = "devices/system/cpu/cpu{core}/topology/thread_siblings_list"


def cores_of_ranks(env: Mapping[str, str], size: int) -> list[list[int]]:
    """The cores to which each local rank is pinned; empty lists if it may use all. Raises ConfigError."""
    if env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip():
        return visible_cores(env, size)
    if not _switch(env, "BYTEPS_NUMA_ON", "0"):
        return [[] for _ in range(size)]
    machine, allowed = detect(), os.sched_getaffinity(0)
    return allocate(
        {node: [core for core in cores if core in allowed] for node, cores in machine.numa.items()} or {0: sorted(allowed)},
        _siblings(allowed), _nodes_of_gpus(env, machine, size), size, quota=_number(env, "BYTEPS_NUMA_DEFAULT_QUOTA"),
        root_quota=_number(env, "BYTEPS_NUMA_ROOT_QUOTA"), excluded=_excluded(env),
        multithreaded=_switch(env, "BYTEPS_MULTITHREADED_CPU", "1"),
    )  # fmt: skip


def visible_cores(env: Mapping[str, str], size: int) -> list[list[int]]:
    """The cores that BYTEPS_VISIBLE_CPU_CORES gives each local rank, as in ``0,2-3:4-7``; empty lists if it is not set."""
    text = env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip()
    if not text:
        return [[] for _ in range(size)]
    wrong = ConfigError(f"BYTEPS_VISIBLE_CPU_CORES={text!r}: expected cores of each of the {size} local ranks, as in 0,2-3:4-7")
    try:
        cores = [[core for item in section.split(",") for core in _range(item)] for section in text.split(":")]
    except ValueError:
        raise wrong from None
    if len(cores) < size or not all(cores):
        raise wrong
    absent = sorted({core for section in cores for core in section} - os.sched_getaffinity(0))
    if absent:
        raise ConfigError(f"BYTEPS_VISIBLE_CPU_CORES={text!r}: this machine has no core {', '.join(map(str, absent))} for us")
    return cores


def allocate(
    numa: Mapping[int, Sequence[int]], siblings: Mapping[int, Collection[int]], wanted: Sequence[int], size: int, *, quota: int = 0,
    root_quota: int = 0, excluded: Collection[int] = (), multithreaded: bool = True,
) -> list[list[int]]:  # fmt: skip
    """Disjoint cores for each local rank, all of one NUMA node each.

    numa:      the cores of each node, by its number. siblings: by core, all hardware threads of its physical core.
    wanted:    by local rank, the node that its GPU is at; -1 if unknown, then the node with the most cores left is taken.
    quota:     physical cores of each rank; 0: an equal share. root_quota: of the last rank, BytePS's root; 0: what its node has left.
    excluded:  cores that nobody gets, nor the other hardware threads of their physical cores. multithreaded: give all hardware threads of a
               physical core, not one of them.

    Raises ConfigError if a rank would have no core.
    """
    usable = {node: {core for core in cores if not {*siblings.get(core, ()), core} & set(excluded)} for node, cores in numa.items()}
    # A physical core is known by the lowest of its hardware threads that is usable.
    left = {
        node: [core for core in sorted(cores) if core == min({*siblings.get(core, ()), core} & cores)] for node, cores in usable.items()
    }
    share = quota or max(1, sum(map(len, left.values())) // size)
    found = []
    for rank in range(size):
        root = rank == size - 1
        node = wanted[rank] if left.get(wanted[rank]) else max(left, key=lambda each: (len(left[each]), -each))
        count = (root_quota or len(left[node])) if root else share
        own, left[node] = left[node][:count], left[node][count:]
        if not own:
            raise ConfigError(
                f"BYTEPS_NUMA_ON=1: no core is left for local rank {rank} of {size}; lower BYTEPS_NUMA_DEFAULT_QUOTA or BYTEPS_LOCAL_SIZE, "
                f"shorten BYTEPS_CPU_BLACKLIST, or unset BYTEPS_NUMA_ON"
            )
        threads = {thread for core in own for thread in ({*siblings.get(core, ()), core} & usable[node])}
        found.append(sorted(threads) if multithreaded else own)
    return found


def near_memory(cores: Sequence[Sequence[int]]) -> list[list[str]]:
    """For each rank the words before its command that have numactl take memory from the rank's NUMA node first; none where there is no numactl, one
    node, or cores of several. A container may forbid it: then none, too."""
    nodes, numactl = detect().numa if any(cores) else {}, shutil.which("numactl")
    if numactl is None or len(nodes) < 2:
        return [[] for _ in cores]
    prefixes = []
    for own in cores:
        near = [node for node, all_of_it in nodes.items() if own and set(own) <= set(all_of_it)]
        words = [numactl, f"--preferred={near[0]}"] if near else []
        prefixes.append(words if words and _runs([*words, "true"]) else [])
    return prefixes


def described(cores: Sequence[Sequence[int]]) -> str:
    """The local ranks and their cores, as text for a note."""
    return ", ".join(f"local rank {rank} on cores {cores_text(own)}" for rank, own in enumerate(cores))


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _siblings(cores: Collection[int], root: Path = Path("/sys")) -> dict[int, tuple[int, ...]]:
    found = {}
    for core in cores:
        file = root / SIBLINGS.format(core=core)
        found[core] = read_cores(file.read_text()) if file.exists() else (core,)
    return found


def _nodes_of_gpus(env: Mapping[str, str], machine: Topology, size: int) -> list[int]:
    """By local rank, the NUMA node of its GPU; -1 if unknown."""
    gpus = gpus_of_ranks(env, machine)
    return [gpus[rank].numa if rank in gpus else -1 for rank in range(size)]


def _excluded(env: Mapping[str, str]) -> set[int]:
    text = env.get("BYTEPS_CPU_BLACKLIST", "").strip()
    try:
        return set() if text in ("", "-1") else {core for item in text.split(",") for core in _range(item)}
    except ValueError:
        raise ConfigError(f"BYTEPS_CPU_BLACKLIST={text!r}: expected cores, as in 0,2-3") from None


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "").strip() or "0"
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r}: expected a number of physical cores")
    return int(text)


def _switch(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, "").strip() or default
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def _range(item: str) -> range:
    first, _, last = item.partition("-")
    return range(int(first), int(last or first) + 1)
