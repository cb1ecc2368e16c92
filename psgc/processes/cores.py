"""The cores that this process, and the processes of its node, may run on: all of the machine's, or those that an affinity (taskset, a container's cpuset)
leaves. All that counts cores for threads or for the planner counts them here."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_of_node(launched: bool) -> int:
    """Cores that the processes of this node share. launched: whether a launcher of psgc has started this one, which may have given each of them some of its own
    cores."""
    own = os.sched_getaffinity(0)
    if launched:
        try:
            launchers = os.sched_getaffinity(os.getppid())
        except OSError:  # it has ended, or is in another namespace
            return len(own)
        if own < launchers:
            return len(launchers)
    return len(own)
