"""When it is said that a member is slow: once it has been so for a while, and then not again for long. Pure: ``now`` is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psgc.observe.live import longest_silence_s
from psgc.observe.slow import Where, slow_members
from psgc.scheduler.roster import Member
from psgc.wire.reports import Report

LOOK_S: Final = 2.0  # a look at a thousand reports takes milliseconds
HOLD_S: Final = 20.0  # a pause, a checkpoint, a validation on one rank is over by then
AGAIN_S: Final = 3600.0


class Slowness:
    """See the module's text."""

    def __init__(self, heartbeat_s: float) -> None:
        self._silence_s = longest_silence_s(heartbeat_s)
        self._most_s = max(HOLD_S / 2, 3 * heartbeat_s)  # between two looks
        self._looked = float("-inf")
        self._since: dict[tuple[str, Where], float] = {}
        self._said: dict[tuple[str, Where], float] = {}

    def tick(self, workers: Iterable[Member], servers: Iterable[Member], now: float) -> list[str]:
        """The lines that are due."""
        if now - self._looked < LOOK_S:
            return []
        if now - self._looked > self._most_s:  # this process did not run
            self._since = {}
        self._looked = now
        found = {(one.member, one.where): one for one in slow_members(self._reports(workers, now), self._reports(servers, now))}
        self._since = {which: self._since.get(which, now) for which in found}
        due = [
            which for which, since in self._since.items() if now - since >= HOLD_S and now - self._said.get(which, float("-inf")) >= AGAIN_S
        ]
        self._said |= dict.fromkeys(due, now)
        return [found[which].text for which in due]

    def _reports(self, members: Iterable[Member], now: float) -> dict[int, Report]:
        there = (member for member in members if not member.away and now - member.last_seen <= self._silence_s)
        return {member.rank: member.report for member in there if member.report is not None}
