"""What a key whose steps do not wait for every rank (PSGC_BACKUP_WORKERS) keeps of the contributions that come late.

A step closes as soon as all but ``most`` ranks have contributed to it and everything that the step before was closed without has come. What comes for it after
that is *late*: it is copied into a slot of the key's own, committed, answered with the step's result, and begins the next step's sum. So each contribution is
in exactly one sum, and no rank is more than one step behind.

Pure, as ``step.py``, which decides by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psgc.server.records import Contribution, Result

LOOKED_AT: Final = 50  # steps after which it is looked at whom they have waited for
HELD_UP: Final = 0.5  # share of their keys that a rank must have held up to be named


class Owed(NamedTuple):
    """A contribution that the last step was closed without. payload_bytes: of its payload, which lies in the slot of its place in ``Kept.owed``; 0 for none."""

    rank: int
    came: bool = False
    skipped: bool = False
    nonfinite: bool = False
    payload_bytes: int = 0


class KeptLate(NamedTuple):
    """What outlives the server's process. owed: by rank, ascending; earlier: the result before the last one, as long as a rank may not have got it."""

    owed: tuple[Owed, ...] = ()
    earlier: Result | None = None


NOTHING_LATE: Final = KeptLate()


@dataclass(slots=True)
class Late:
    """See the module's text. most: how many ranks a step may be closed without.

    tardy: contributions to the step that is being completed, which was closed without them; closed: the step under way takes no more; folded: slots that the
    sum under way is past; queued: ranks on whose present connection ``earlier`` has been queued, as bits; first: a rank that the last step was closed
    with, and what it said; held_up_by: the rank whose late contribution the step under way has waited for at the last; -1: nobody's; dropped: the
    ranks have not applied the last step, and nothing gives it back, so that what came late for it is in no sum either."""

    most: int
    owed: list[Owed] = field(default_factory=list)
    earlier: Result | None = None
    queued: int = 0
    tardy: dict[int, Contribution] = field(default_factory=dict)
    closed: bool = False
    folded: int = 0
    first: tuple[int, Contribution] | None = None
    held_up_by: int = -1
    dropped: bool = False

    def take_up(self, kept: KeptLate) -> None:
        """Go on from what a former process has kept."""
        self.owed, self.earlier = list(kept.owed), kept.earlier

    @property
    def kept(self) -> KeptLate:
        return KeptLate(tuple(self.owed), self.earlier)

    @property
    def awaited(self) -> list[int]:
        """Ranks whose contribution to the last step is missing."""
        return [owed.rank for owed in self.owed if not owed.came]

    def owes(self, rank: int) -> bool:
        """Whether the rank's contribution to the last step is missing."""
        return any(owed.rank == rank and not owed.came for owed in self.owed)

    @property
    def slots(self) -> list[int]:
        """Slots that hold payloads of the sum under way, in the order of their ranks."""
        return [slot for slot, owed in enumerate(self._summed) if owed.payload_bytes]

    @property
    def poisoned(self) -> bool:
        return any(owed.nonfinite for owed in self._summed)

    @property
    def _summed(self) -> list[Owed]:
        return [] if self.dropped else self.owed

    @property
    def contributors(self) -> int:
        """How many late contributions are in the sum under way, once all have come."""
        return sum(owed.came and not owed.skipped for owed in self._summed)

    def take(self, rank: int, contribution: Contribution) -> int:
        """A late contribution has come. Returns the slot for its payload."""
        slot = next(slot for slot, owed in enumerate(self.owed) if owed.rank == rank)
        nbytes = 0 if contribution.payload is None else contribution.payload_bytes
        self.owed[slot] = Owed(rank, True, contribution.skipped, contribution.nonfinite, nbytes)
        return slot

    def completed(self, result: Result | None, queued: int, ranks: Sequence[int], contributions: dict[int, Contribution]) -> None:
        """A step is complete, with these contributions. result, queued: of the step before it."""
        self.owed = [Owed(rank) for rank in ranks if rank not in contributions]
        self.earlier, self.queued = (result, queued) if self.owed else (None, 0)
        rank, said = next(iter(contributions.items()))
        said.payload = None
        self.first = rank, said
        self.closed, self.folded, self.dropped = False, 0, False


@dataclass(slots=True)
class HeldUp:
    """Whom a layout's steps wait for although they may be closed without: a rank that is slow in every step, which nothing can hide."""

    since: int = -1  # the last step that was looked at, or before the first of which this process knows; -1: none has been closed
    step: int = 0
    closings: int = 0
    by: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)

    def note(self, rank: int, step: int) -> None:
        """A step of a key has been closed. rank: held it up; -1: nobody has."""
        if self.since < 0:
            self.since = step - 1
        self.step = max(self.step, step)
        self.closings += 1
        if rank >= 0:
            self.by[rank] = self.by.get(rank, 0) + 1

    def due(self) -> list[tuple[int, float]]:
        """Ranks that have held up most of the last steps, each once, with the share of these."""
        if self.step - self.since < LOOKED_AT:
            return []
        shares = {rank: count / self.closings for rank, count in sorted(self.by.items())}
        self.since, self.closings, self.by = self.step, 0, {}
        found = [(rank, share) for rank, share in shares.items() if share > HELD_UP and rank not in self.told]
        self.told.update(rank for rank, _ in found)
        return found


__all__ = ["LOOKED_AT", "NOTHING_LATE", "HeldUp", "KeptLate", "Late", "Owed"]
