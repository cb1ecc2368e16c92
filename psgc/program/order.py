"""One order over all transfers of a step, which every rank keeps to. Pure.

Pushes and pulls have turns in it, too. No lane waits for them, but servers' windows let in contributions in this order (``psgc.layout.contributions``).

Ranks that began collectives of one group in different orders would wait for each other for ever. So each lane of a rank begins its transfers in the
order given here, whatever arrives first; and since the order has the transfers of a part in the part's own order, and is the same on all ranks, the
first transfer in it that is not over can always go on: all that its ranks have to do before is before it in the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def issued(option: tuple[str, ...]) -> tuple[int, ...]:
    """The actions of an option that wait for a turn, the control word at the end."""
    return (*(action for action, text in enumerate(option) if is_issued(text)), len(option))


def pipelined(options: Sequence[tuple[str, ...]]) -> tuple[Turn, ...]:
    """The order for parts that come one after the other, as backward has them: the n-th transfer of a part goes along with the (n+1)-th of
    the part before, so that links of different levels work at the same time. options: by chain."""
    keyed = [
        ((chain + place, chain), Turn(chain, action)) for chain, option in enumerate(options) for place, action in enumerate(issued(option))
    ]
    return tuple(turn for _, turn in sorted(keyed))


def ordered(options: Sequence[tuple[str, ...]], turns: Sequence[Sequence[int]]) -> tuple[Turn, ...]:
    """The order in which every transfer has the turn that it was given. turns: by chain, of its issued actions. Raises UsageError for turns of other
    options, or out of a part's order."""
    keyed = []
    for chain, (option, own) in enumerate(zip(options, turns, strict=True)):
        if len(own) != len(issued(option)) or any(first >= second for first, second in pairwise(own)):
            raise UsageError(
                f"the turns of part {chain} are {tuple(own)}, expected {len(issued(option))} ascending numbers; make the plan anew"
            )
        keyed += [(turn, chain, Turn(chain, action)) for turn, action in zip(own, issued(option), strict=True)]
    return tuple(turn for _, _, turn in sorted(keyed))


def order_of(parts: Sequence[tuple[tuple[str, ...], int, Sequence[int]]]) -> tuple[Turn, ...]:
    """The order of a layout: the plan's where it has one, else that of a pipeline. parts: of each bucket that has an option, in the layout's order, the
    option, how many parts there are, and the turns that the plan gives them, part after part."""
    options = [option for option, count, _ in parts for _ in range(count)]
    if not all(turns for _, _, turns in parts):
        return pipelined(options)
    own = []
    for _, count, turns in parts:
        each = len(turns) // count
        own += [turns[each * number : each * (number + 1)] for number in range(count)]
    return ordered(options, own)
