"""One order of all transfers of a step, which every rank follows. Pure.

If ranks began the collectives of a group in different orders, they would deadlock. So each lane of a rank begins its transfers in the order given here,
whatever becomes ready first. The order is the same on all ranks, and contains the transfers of each part in the part's own order. So the first unfinished
transfer can always proceed: everything that its ranks must finish before it comes earlier in the order.

Pushes and pulls have turns, too. No lane waits for them, but servers' windows admit contributions in this order (``psgc.layout.contributions``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from psgc.errors import UsageError
from psgc.program.steps import LANES


class Turn(NamedTuple):
    """One action of one part. chain: the part's number among all parts of the layout; action: index into the option; the index behind the last one means
    the control word."""

    chain: int
    action: int


def is_issued(action: str) -> bool:
    """Whether the action waits for a turn."""
    return action.partition(".")[0] in LANES


def issued(option: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the option's actions that wait for a turn, then that of the control word."""
    return (*(action for action, text in enumerate(option) if is_issued(text)), len(option))


def pipelined(options: Sequence[tuple[str, ...]]) -> tuple[Turn, ...]:
    """The order for parts that become ready one after the other, as in backward. The n-th transfer of a part comes next to the (n+1)-th of the part before
    it, so that links of different levels work at the same time. options: by chain."""
    keyed = [
        ((chain + place, chain), Turn(chain, action)) for chain, option in enumerate(options) for place, action in enumerate(issued(option))
    ]
    return tuple(turn for _, turn in sorted(keyed))


def ordered(options: Sequence[tuple[str, ...]], turns: Sequence[Sequence[int]]) -> tuple[Turn, ...]:
    """The order given by these turns. turns: for each chain, the turn of each of its ``issued`` actions. Raises UsageError for turns that do not fit the
    options, or that contradict the order within a part."""
    keyed = []
    for chain, (option, own) in enumerate(zip(options, turns, strict=True)):
        if len(own) != len(issued(option)) or any(first >= second for first, second in pairwise(own)):
            raise UsageError(
                f"the turns of part {chain} are {tuple(own)}, expected {len(issued(option))} ascending numbers; make the plan anew"
            )
        keyed += [(turn, chain, Turn(chain, action)) for turn, action in zip(own, issued(option), strict=True)]
    return tuple(turn for _, _, turn in sorted(keyed))


def order_of(parts: Sequence[tuple[tuple[str, ...], int, Sequence[int]]]) -> tuple[Turn, ...]:
    """The order of a layout: the plan's if it has one, else ``pipelined``. parts: for each bucket that has an option, in the layout's order, the option,
    the number of parts, and the turns that the plan gives them, part after part."""
    options = [option for option, count, _ in parts for _ in range(count)]
    if not all(turns for _, _, turns in parts):
        return pipelined(options)
    own = []
    for _, count, turns in parts:
        each = len(turns) // count
        own += [turns[each * number : each * (number + 1)] for number in range(count)]
    return ordered(options, own)
