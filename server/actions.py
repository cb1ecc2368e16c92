"""What a key's state has its server do, in the order in which it says so; and what of a key outlives the server's process. Pure records."""

from __future__ import annotations

from typing import Any, NamedTuple

from psgc.server.late import NOTHING_LATE, KeptLate
from psgc.server.records import NO_SLOT, Result
from psgc.wire.frames import Header


class Reply(NamedTuple):
    """Send ``header`` to ``rank``, with the payload of ``result`` if that has one."""

    rank: int
    header: Header
    result: Result | None = None


class Fold(NamedTuple):
    """Sum one block's payloads in rank order. ``fresh``: they start the sum. ``last``: then divide, add the residual, encode into
    result buffer ``slot``, and call ``KeyState.folded``.

    add_back: the residual also gets the result that buffer ``add_back`` holds (the trainer skipped that step).
    rescale: multiplies the residual (and what was added back) first.
    staleness: of weights, how many updates the delta's base lacks.
    divisor: of sums' last block: how many ranks the mean is of, 1 where none is taken.
    late: slots whose late contributions are the block's payloads, in this order; ``rescale`` then multiplies the sum afterwards, which becomes one in the unit
    of the step under way.
    """

    key: int
    step: int
    payloads: tuple[Any, ...]
    fresh: bool
    last: bool
    slot: int = NO_SLOT
    add_back: int = NO_SLOT
    rescale: float = 1.0
    staleness: int = 0
    divisor: int = 1
    late: tuple[int, ...] = ()


class Commit(NamedTuple):
    """Make ``result`` durable, and, if ``residual``, the residual that was written with it. Nothing that follows is sent before that.

    add_back, rescale: what the next Fold of a last block does to the residual, as far as it is known; see there."""

    key: int
    result: Result
    residual: bool
    add_back: bool = False
    rescale: float = 1.0
    late: KeptLate = NOTHING_LATE


class KeepLate(NamedTuple):
    """Copy a late contribution's payload (None: it has none) into the key's slot ``slot``, then make that durable. Its rank is answered after that, and may
    overwrite it."""

    slot: int
    payload: Any
    commit: Commit

    @property
    def key(self) -> int:
        return self.commit.key


class Kept(NamedTuple):
    """What of a key outlives the server's process, beside the contents of its buffers; a process that takes the place of another goes on from there.
    result: None before the first step is complete. newest: the buffer of the newest result with a payload."""

    result: Result | None
    newest: int = NO_SLOT
    add_back: bool = False
    rescale: float = 1.0
    late: KeptLate = NOTHING_LATE


class Lend(NamedTuple):
    """Send ``header`` to ``rank`` with elements of the residual, from element ``header.contributors`` on. ``add_back`` as in a Fold, but on a
    copy: the residual itself does not change."""

    rank: int
    header: Header
    add_back: int = NO_SLOT


class Restore(NamedTuple):
    """Set elements of the key's residual, from ``first`` on, and what multiplies it first."""

    key: int
    first: int
    payload: Any
    rescale: float


Action = Reply | Fold | Commit | KeepLate | Lend | Restore
