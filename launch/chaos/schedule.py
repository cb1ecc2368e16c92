"""What happens to a job's members, and when: a pure function of a seed. Knows roles and numbers, not processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from psgc.errors import UsageError

Kind = Literal["kill", "stop", "cut", "slow"]
Role = Literal["server", "scheduler", "worker"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
ROLES: Final[tuple[Role, ...]] = get_args(Role)
TOGETHER: Final = 0.15  # share of events that come before the last one is over
FOR_S: Final = (0.05, 3.0)  # how long a member is stopped, or its connections are slow
FOLLOWED: Final = (
    0.35  # share of kills after which the process that takes the killed one's place, or the scheduler meanwhile, is killed, too
)
AGAIN_S: Final = (0.0, 2.0)  # from when that process was seen: it starts and joins for a few seconds
RATES: Final = (20_000, 200_000, 2_000_000)  # bytes a second of slow connections


@dataclass(frozen=True, slots=True)
class Event:
    """One blow. pause_s: after the last event, or after it is over; together: it does not wait for that; member: which of its role, as a share of them in
    [0, 1); for_s, rate: of those that last; again: who is killed again_s after a process was seen that takes this one's place: that process, where it is of the
    event's role, or the scheduler."""

    number: int
    kind: Kind
    role: Role
    member: float
    pause_s: float
    together: bool
    for_s: float = 0.0
    rate: int = 0
    again: Role | None = None
    again_s: float = 0.0

    def of(self, members: int) -> int:
        """Which of so many."""
        return int(self.member * members)


def schedule(seed: int, events: int, roles: Sequence[Role], kinds: Sequence[Kind], every_s: float) -> tuple[Event, ...]:
    """The events of a seed. A schedule's beginning is that of any longer one. every_s: the mean pause between two."""
    rng, again = random.Random(f"psgc chaos {seed}"), random.Random(f"psgc chaos {seed}, again")
    found = []
    for number in range(events):
        kind, role, member = rng.choice(kinds), rng.choice(roles), rng.random()
        pause, together = every_s * (0.5 + rng.random()), rng.random() < TOGETHER
        for_s, rate = round(FOR_S[0] * (FOR_S[1] / FOR_S[0]) ** rng.random(), 3), rng.choice(RATES)
        lasts = kind in ("stop", "slow")
        event = Event(number, kind, role, member, round(pause, 3), together, for_s if lasts else 0.0, rate if kind == "slow" else 0)
        followed, who, after = again.random() < FOLLOWED, again.choice((role, "scheduler")), round(again.uniform(*AGAIN_S), 3)
        if kind == "kill" and followed and who in roles:
            event = replace(event, again=who, again_s=after)
        found.append(event)
    return tuple(found)


def roles_of(text: str) -> tuple[Role, ...]:
    """``server,scheduler``. Raises UsageError."""
    return tuple(role for role in ROLES if role in _listed("roles", text, ROLES))


def kinds_of(text: str) -> tuple[Kind, ...]:
    """``kill,stop``. Raises UsageError."""
    return tuple(kind for kind in KINDS if kind in _listed("kinds", text, KINDS))


def _listed(flag: str, text: str, known: Sequence[str]) -> set[str]:
    found = {item.strip() for item in text.split(",") if item.strip()}
    if not found or not found <= set(known):
        raise UsageError(f"chaos: --{flag} {text}: expected one or more of {','.join(known)}")
    return found
