"""When members wait for others: what is said of it, and when it is given up. Pure: ``now`` is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psgc.processes.reminder import Reminder
from psgc.scheduler.rendezvous import Gathering


class Overdue(Exception):
    """What is awaited is later than the limit; the text says what. ranks: those that are awaited."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


def in_turn(awaited: Iterable[int], gatherings: Iterable[Gathering]) -> str:
    """The end of a line on ranks that were awaited for too long: what they wait for themselves, if that is other ranks; else empty. gatherings: those at
    which workers wait for workers."""
    for gathering in sorted(gatherings, key=lambda each: each.since):
        ranks = sorted(gathering.came.intersection(awaited))
        if ranks and gathering.missing:
            who = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            return f"; rank(s) {who} have come to {gathering.what}, which awaits {gathering.awaited}: every rank must make the same calls"
    return ""


class Lateness:
    """Names what is late: at most one line for all barriers, one for all declarations, and so on. limit_s: then it is given up."""

    def __init__(self, silence_s: float, limit_s: float) -> None:
        self._silence_s, self._limit_s = silence_s, limit_s
        self._late: Final[dict[int, Reminder]] = {}  # by kind, while some of it are late

    def tick(self, kinds: Iterable[list[Gathering]], now: float) -> list[str]:
        """The lines that are due. kinds: what is awaited, each kind by itself, in the same order each time. Raises Overdue."""
        texts = []
        for kind, gatherings in enumerate(kinds):
            late = [gathering for gathering in gatherings if now - gathering.since >= self._silence_s]
            if not late:
                self._late.pop(kind, None)
            elif text := self._name(kind, late, now):
                texts.append(text)
        return texts

    def _name(self, kind: int, late: list[Gathering], now: float) -> str:
        """The oldest of one kind, if that is due."""
        oldest = min(late, key=lambda gathering: gathering.since)
        waited = now - oldest.since
        more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
        text = f"{oldest.what}{more} has awaited {oldest.awaited} for {waited:.0f} s"
        if oldest.of_servers:
            text += ": they load its codec's kernels, or compile them (`psgc warm` does that ahead)"
        if waited > self._limit_s:
            ranks = [] if oldest.of_servers else oldest.missing
            raise Overdue(f"{text}, more than the limit of {self._limit_s:.0f} s (PSGC_STEP_TIMEOUT_S)", ranks)
        return text if self._late.setdefault(kind, Reminder(oldest.since)).due(now, self._silence_s) else ""
