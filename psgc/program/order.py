"""One order over all transfers of a step, which every rank keeps to. Pure.

Ranks that began collectives of one group in different orders would wait for each other for ever. So each lane of a rank begins its transfers in the
order given here, whatever arrives first; and since the order has the transfers of a part in the part's own order, and is the same on all ranks, the
first transfer in it that is not over can always go on: all that its ranks have to do before is before it in the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psgc.errors import UsageError
from psgc.program.steps import LANES


class Turn(NamedTuple):
    """One action of one part. chain: the part's number among all parts of the layout; action: its place in the option, or after it the control word."""

    chain: int
    action: int


def is_issued(action: str) -> bool:
    """Whether the action waits for a turn."""
    return action.partition(".")[0] in LANES


def pipelined(options: Sequence[tuple[str, ...]]) -> tuple[Turn, ...]:
    """The order for parts that come one after the other, as backward has them: the n-th transfer of a part goes along with the (n+1)-th of
    the part before, so that links of different levels work at the same time. options: by chain."""
    keyed = []
    for chain, option in enumerate(options):
        issued = [action for action, text in enumerate(option) if is_issued(text)]
        keyed += [((chain + place, chain), Turn(chain, action)) for place, action in enumerate((*issued, len(option)))]
    return tuple(turn for _, turn in sorted(keyed))


def check_order(order: Sequence[Turn], options: Sequence[tuple[str, ...]]) -> None:
    """Raise UsageError unless the order has every transfer and control word of these options once, each part's in the part's order."""
    wanted = {
        Turn(c, a) for c, option in enumerate(options) for a in (*(a for a, text in enumerate(option) if is_issued(text)), len(option))
    }
    if len(order) != len(wanted) or set(order) != wanted:
        odd = min(set(order) ^ wanted, default=order[0] if order else None)
        raise UsageError(f"the issue order lacks {odd}, has it twice or should not have it; make the plan anew with psgc plan")
    last: dict[int, int] = {}
    for turn in order:
        if last.get(turn.chain, -1) > turn.action:
            raise UsageError(
                f"the issue order has action {turn.action} of part {turn.chain} after a later one; make the plan anew with psgc plan"
            )
        last[turn.chain] = turn.action
