"""What a worker knows of its job: the members, the layouts that have been agreed, and how long ranks wait.

Written by the network thread alone; any thread reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from psgc.layout import Layout
from psgc.wire.messages import Topology
from psgc.wire.reports import Report


@dataclass(slots=True)
class Waiting:
    """How long ranks have waited for results of steps, in total: this rank, and all ranks as the scheduler last reported."""

    own_s: float = 0.0
    slowest_rank: int = -1  # the one that waited least; -1: not known
    least_ms: int = 0
    most_ms: int = 0


@dataclass(slots=True)
class Membership:
    """Of one worker. topology: None until everyone is there. reporter: makes what this rank tells of itself once a heartbeat, and is set by the session.
    taken: by layout, steps that the rank had taken before this process took another's place; set before any layout is declared."""

    topology: Topology | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)  # by name
    waiting: Waiting = field(default_factory=Waiting)
    reporter: Callable[[], Report] | None = None
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def rank_text(self) -> str:
        return "?" if self.topology is None else str(self.topology.rank)
