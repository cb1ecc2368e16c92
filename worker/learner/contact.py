"""Whether a learner reaches its syncer: when that is said, and when whoever waits gives up. Pure: ``now`` is passed in.

The syncer is reached once it has answered on a connection. One on which it has, but which breaks again and again before anything that is awaited comes through,
is none. A slow one is not late. Time in which this process did not run counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psgc.processes.absence import Absence, younger
from psgc.processes.breaks import MANY, Breaks
from psgc.processes.reminder import Reminder


@dataclass(slots=True)
class Wait:
    """The training thread waits for a fragment since ``began``."""

    fragment: int
    began: float
    _named: Reminder = field(init=False)

    def __post_init__(self) -> None:
        self._named = Reminder(self.began)

    def due(self, now: float, first_s: float) -> float | None:
        """For how many seconds it has waited, where that is to be said now."""
        return now - self.began if self._named.due(now, first_s) else None

    def was_away(self, away: float, now: float) -> None:
        self.began = younger(self.began, away, now)
        self._named.was_away(away, now)


class Silence:
    """Of a syncer that is connected, and from which an answer is to come that nobody waits for: whether anything moves."""

    def __init__(self) -> None:
        self._moved: tuple[int, int] | None = None  # bytes on the wire, and how many fragments wait for an answer, when that last changed
        self._wait: Wait | None = None

    def due(self, now: float, wire_bytes: int, unanswered: int, first_s: float) -> float | None:
        """For how many seconds nothing has moved, where that is to be said now."""
        if not unanswered:
            self._moved = self._wait = None
            return None
        if self._wait is None or (wire_bytes, unanswered) != self._moved:
            self._moved, self._wait = (wire_bytes, unanswered), Wait(-1, now)
        return self._wait.due(now, first_s)

    def was_away(self, away: float, now: float) -> None:
        if self._wait is not None:
            self._wait.was_away(away, now)


class Contact:
    """began: when the learner began; every_s: from one tick to the next."""

    def __init__(self, began: float, every_s: float = 0.25) -> None:
        self._since: float | None = began  # when the syncer was last reached; None while it is
        self._breaks = Breaks()
        self._named: Reminder | None = Reminder(began)
        self._absence = Absence(every_s, began)

    def tick(self, now: float, *waits: Wait | Silence | None) -> None:
        """Call it before anything else is asked: this process heard nothing while it did not run, which is left out of these waits, too."""
        away = self._absence.ended(now)
        if not away:
            return
        self._since = None if self._since is None else younger(self._since, away, now)
        self._breaks.was_away(away, now)
        for each in (self._named, *waits):
            if each is not None:
                each.was_away(away, now)

    def down(self, now: float) -> None:
        """The connection has broken."""
        self._since = now if self._since is None else self._since
        self._breaks.broke(now)

    def answered(self, now: float, progress: bool) -> None:
        """The syncer has said something on this connection. progress: what was awaited, or nothing is."""
        self._since = None
        if progress:
            self._breaks.came_through(now)
        if self.out_of_reach(now) is None:
            self._named = None

    def out_of_reach(self, now: float) -> float | None:
        """For how many seconds; None where the syncer is reached."""
        often = self._breaks.count >= MANY
        if self._since is None and not often:
            return None
        return now - min(self._since if self._since is not None else now, self._breaks.first if often else now)

    def late(self, now: float, limit_s: float, began: float) -> tuple[float, str] | None:
        """For whoever waits since ``began``: for how many seconds of that there was no contact, if that is longer than the limit, and what else is to be said
        of it. Before, nobody had asked for anything: a syncer that was away for a day may come back in a moment."""
        out = self.out_of_reach(now)
        out = None if out is None else min(out, now - began)
        if out is None or out <= limit_s:
            return None
        return out, f", to which the connection {self._breaks.text(now)}" if self._breaks.count >= MANY else ""

    def due(self, now: float, first_s: float) -> float | None:
        """For how many seconds there has been no contact, where that is to be said now."""
        out = self.out_of_reach(now)
        if out is None:
            return None
        self._named = self._named or Reminder(now - out)
        return out if self._named.due(now, first_s) else None
