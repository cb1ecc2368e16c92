"""The undisturbed run, the disturbed one, and the report on both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psgc.launch.chaos.promises import broken, fatal, reference_of, shrunk, starts_again
from psgc.launch.chaos.recovery import bars, summary
from psgc.launch.chaos.running import Blow, Running, can_touch_connections
from psgc.launch.chaos.schedule import Event


@dataclass(frozen=True, slots=True)
class Report:
    """Of one check. events: how many were asked for; ends: why the job was to end, by policy; untouched: why connections were left alone.
    shrinks: whether means were of those that lived; again: whether a job that was to end was started again, to its end in order."""

    seed: int
    events: int
    blows: Sequence[Blow]
    broken: Sequence[str]
    ends: str = ""
    untouched: str = ""
    shrinks: bool = False
    again: bool = False

    @property
    def happened(self) -> int:
        """How many of the events."""
        return sum(not blow.again for blow in self.blows)

    @property
    def untried(self) -> str:
        """Why nothing is known of the promises; empty where something was done to the job."""
        return "" if self.blows else f"none of the {self.events} events happened, so nothing was tried"

    def times(self) -> dict[str, list[float]]:
        """Seconds until the job had gone on, by kind and role."""
        found: dict[str, list[float]] = {}
        for blow in self.blows:
            if blow.recovered_s is not None:
                found.setdefault("{kind} {role}".format(**blow.done), []).append(blow.recovered_s)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        blows = [
            {**asdict(blow.event), **blow.done, "name": blow.name, "at_s": blow.at_s, "recovered_s": blow.recovered_s}
            for blow in self.blows
        ]
        recovery = {what: summary(times) for what, times in self.times().items()}
        return {
            "seed": self.seed, "events": self.events, "happened": self.happened, "again": len(self.blows) - self.happened, "ends": self.ends,
            "untouched": self.untouched, "broken": list(self.broken),
            "blows": blows, "recovery": recovery,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"seed {self.seed}: {self.happened} of {self.events} events happened"]
        if again := len(self.blows) - self.happened:
            lines.append(f"{again} more kills while a process came into a killed one's place")
        if self.untouched and self.happened < self.events:
            lines.append(f"no connection was cut or slowed: {self.untouched}")
        if self.happened < self.events and not self.ends:
            lines.append("the job ended before the others: have it take more steps")
        for what, times in self.times().items():
            lines += [
                f"went on after {what}: {len(times)} times, median {sorted(times)[len(times) // 2]:.2f} s, longest {max(times):.2f} s",
                *bars(times),
            ]
        if self.untried and not self.broken:
            return [*lines, self.untried]
        if self.broken:
            return [*lines, *(f"BROKEN: {text}" for text in self.broken)]
        kept = (
            f"it was started again (PSGC_RESTARTS), since {self.ends}, and ended in order"
            if self.again
            else f"it ended, as it should ({self.ends}), with a line that says why"
            if self.ends
            else "it went on without those that were killed (PSGC_ON_WORKER_LOSS=shrink), so that results may differ, and ranks agree"
            if self.shrinks
            else "results are those of the undisturbed run, bit for bit"
        )
        return [*lines, f"kept: {kept}; nothing is left"]


def check(
    command: Sequence[str], events: Sequence[Event], seed: int, progress: re.Pattern[str], result: re.Pattern[str], limit_s: float, say: Callable[[str], None],
) -> Report:  # fmt: skip
    """Run the job undisturbed, then with these events. Raises UsageError for a job that cannot be checked."""
    untouched = can_touch_connections()
    if untouched and any(event.kind in ("cut", "slow") for event in events):
        say(f"no connection will be cut or slowed: {untouched}")
    say("the undisturbed run")
    undisturbed = Running(command, progress, limit_s, say).through(())
    reference = reference_of(undisturbed.run, result, undisturbed.stuck)
    say(f"the run with {len(events)} events of seed {seed}")
    running = Running(command, progress, limit_s, say, connected=not untouched)
    outcome = running.through([event for event in events if not untouched or event.kind not in ("cut", "slow")])
    ends, shrinks, again = fatal(outcome.killed), shrunk(outcome.killed), starts_again(outcome.killed)
    found = broken(outcome.run, reference, result, ends, shrinks, again)
    if outcome.stuck:
        found.insert(0, outcome.stuck)
    if found:
        for line in running.last_lines:
            say(f"  {line}")
    return Report(seed, len(events), outcome.blows, found, ends, untouched, shrinks, bool(ends and again and not outcome.run.status))


def described(event: Event) -> str:
    """An event, for people."""
    lasts = f" for {event.for_s:g} s" if event.for_s else ""
    rate = f" to {event.rate} bytes a second" if event.rate else ""
    after = "with the last one" if event.together else "when the job goes on"
    return (
        f"event {event.number}: {event.pause_s:g} s later, {after}: {event.kind} a {event.role} ({event.member:.3f} of them){lasts}{rate}"
    )
