"""How a worker or server finds out whether the scheduler is alive, and when it gives the scheduler up. Pure: ``now`` is passed in.

On the scheduler's own host only a process that is gone is dead; one that is stopped or busy is named and waited for, because steps go on
without it. From another host, only its messages and the connection show whether it is alive. A scheduler that is dead may be followed by another process:
whoever starts that one holds its listening socket, or has said that it comes (``returns``); then it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import Reminder

LAST_WORDS_S: Final = 1.5  # time for the messages that a process sent before it ended


@dataclass(frozen=True, slots=True)
class Sign:
    """A line for the log. gone: this process cannot go on with the job. cut_off: for all it knows the scheduler lives, and the job goes on."""

    text: str
    gone: bool = False
    cut_off: bool = False


@dataclass(slots=True)
class Lifeline:
    """See the module's text. every_s: from one tick to the next. alive: whether the scheduler's process runs; None if that is
    unknown (it is on another host), or not known yet. refused: whether its machine answers that nobody listens there. turned_away: a sentence that says who
    refuses this member's connection, and why; empty if that is not certain."""

    endpoint: str
    silence_s: float
    dead_s: float
    every_s: float
    began: float
    refused: Callable[[float], bool]
    alive: Callable[[], bool | None] = lambda: None
    turned_away: Callable[[], str] = lambda: ""
    returns: bool = False  # another process may follow the scheduler though nobody listens at its address meanwhile
    up: bool = False  # the connection
    answered: float = float("-inf")  # when the scheduler last said something, or the connection was made
    last_seen: float = field(init=False)
    down_since: float = field(init=False)
    _absence: Absence = field(init=False)
    _named: Reminder | None = None  # of its silence, since it was last heard
    _refusal: str = ""  # what ``turned_away`` has said of the connection that cannot be made: its silence has no other cause

    def __post_init__(self) -> None:
        self.last_seen = self.down_since = self.began
        self._absence = Absence(self.every_s, self.began)

    def hear(self, now: float) -> None:
        """A message of the scheduler has come."""
        self.last_seen = self.answered = now
        self._named = None

    def talks(self, now: float) -> bool:
        """Whether the scheduler has answered lately: it then ends the job itself at its limits, and can say who is missing."""
        return now - self.answered <= 2 * self.silence_s

    def connection(self, up: bool, now: float) -> None:
        """The connection was made, or has broken."""
        if self.up and not up:
            self.down_since = now
        if up:
            self.answered, self._refusal = now, ""
        self.up = up

    def tick(self, now: float) -> Sign | None:
        """The line to log now, or None."""
        self._allow_for_absence(now)
        quiet = now - self.last_seen
        alive = self.alive()
        dead = alive is False and quiet > LAST_WORDS_S
        if dead and not self.returns and self.refused(now):
            return self._gone("is gone: its process has ended; look at its log for why")
        self._ask_why()
        if dead and quiet > self.dead_s:
            how = f"is gone: its process has ended, and no other has followed within {quiet:.0f} s (PSGC_DEAD_S); look at its launcher"
            return self._turned_away(quiet) or self._gone(how)
        if alive is None:
            down = 0.0 if self.up else now - self.down_since
            if down > self.silence_s and not self.returns and self.refused(now):
                return self._gone(
                    f"is gone: its connection broke {down:.0f} s ago and nobody listens there; look at its log for why it ended"
                )
            if quiet > self.dead_s:
                how = f"has said nothing for {quiet:.0f} s and counts as dead (PSGC_DEAD_S); are its machine and the network alive?"
                return self._turned_away(quiet) or replace(self._gone(how), cut_off=True)
        if quiet < self.silence_s:
            return None
        self._named = self._named or Reminder(self.last_seen)
        if not self._named.due(now, self.silence_s):
            return None
        if self._refusal:
            limit = "" if alive else f", for {self.dead_s:.0f} s at most (PSGC_DEAD_S)"
            return Sign(f"{self._refusal}; it is asked again{limit}")
        prospect = (
            "its process is stopped or busy, and is waited for"
            if alive
            else f"its process has ended, and another is waited for, {self.dead_s:.0f} s at most (PSGC_DEAD_S)"
            if dead
            else f"after {self.dead_s:.0f} s it counts as dead (PSGC_DEAD_S)"
        )
        return Sign(f"the scheduler at {self.endpoint} has said nothing for {quiet:.0f} s; {prospect}")

    def _allow_for_absence(self, now: float) -> None:
        """This process received nothing while it did not run; the scheduler was not silent because of that."""
        if away := self._absence.ended(now):
            self.last_seen, self.down_since = younger(self.last_seen, away, now), younger(self.down_since, away, now)

    def _ask_why(self) -> None:
        """While the connection cannot be made: a token that this member has missed, for example, is not a silent scheduler's fault."""
        if not self.up and not self._refusal and (why := self.turned_away()):
            self._refusal, self._named = why, None  # it is said at once, whatever was said before

    def _turned_away(self, quiet: float) -> Sign | None:
        """Whoever refuses this member lives: the job may go on without it."""
        return Sign(f"{self._refusal}; it was asked again for {quiet:.0f} s (PSGC_DEAD_S)", True, True) if self._refusal else None

    def _gone(self, how: str) -> Sign:
        return Sign(f"the scheduler at {self.endpoint} {how}", gone=True)
