"""Programs of all ranks run together, action by action, with obvious code: what an executor's results are held against.

Values are columns of any height, so that a test can follow each rank's contribution to each element: column r counts rank r's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Exchange, Program, Raw, Serve, Transfer

Values = NDArray[Any]  # [elements, height]


@dataclass
class _Rank:
    """What one rank holds. Elements that it does not hold are garbage on purpose."""

    array: Values
    payloads: dict[Range, list[Values]] = field(default_factory=dict)


Loss = Callable[[int, Range, int], float]


def run(programs: Sequence[Program], values: Sequence[Values], garbage: float = -1000, loss: Loss = lambda *_: 0.0) -> list[Values]:
    """What each rank's array holds at the end, given what each begins with. loss: what encoding adds to each element, by slot, piece and leader."""
    ranks = [_Rank(np.array(own)) for own in values]
    for action in sorted({step.action for program in programs for step in program.steps}):
        steps = {r: step for r, program in enumerate(programs) for step in program.steps if step.action == action}
        transfers = {r: step for r, step in steps.items() if isinstance(step, Transfer)}
        for r, step in steps.items():
            if isinstance(step, Encode):
                _encode(ranks[r], step, garbage, loss)
            elif isinstance(step, Decode):
                _decode(ranks[r], step)
        if transfers:
            _transfer(ranks, transfers, garbage)
        _serve(ranks, {r: step for r, step in steps.items() if isinstance(step, Serve)}, garbage)
    return [rank.array for rank in ranks]


def _encode(rank: _Rank, step: Encode, garbage: float, loss: Loss) -> None:
    assert not rank.payloads
    rank.payloads = {
        piece: [rank.array[slice(*piece)] + loss(step.slot, piece, leader)] for piece, leader in zip(step.pieces, step.leaders, strict=True)
    }
    rank.array[:] = garbage


def _decode(rank: _Rank, step: Decode) -> None:
    assert {one: len(payloads) for one, payloads in rank.payloads.items()} == dict(zip(step.pieces, step.counts, strict=True))
    for (lo, hi), payloads in rank.payloads.items():
        rank.array[lo:hi] = sum(payloads)
    rank.payloads = {}


def _serve(ranks: list[_Rank], serves: dict[int, Serve], garbage: float) -> None:
    """What a server does of each piece that some ranks push."""
    pieces = sorted({piece for step in serves.values() for piece in step.pieces})
    pushed = {p: [_pushed(ranks[r], p, step.slot) for r, step in serves.items() if p in step.pieces] for p in pieces}
    for r, step in serves.items():
        ranks[r].array[:] = garbage
        for lo, hi in step.pieces:
            if step.slot is None:
                ranks[r].array[lo:hi] = sum(pushed[lo, hi])
            else:
                ranks[r].payloads[lo, hi] = [sum(pushed[lo, hi])]


def _pushed(rank: _Rank, piece: Range, slot: int | None) -> Values:
    if slot is None:
        return rank.array[slice(*piece)].copy()
    (payload,) = rank.payloads[piece]
    return payload


def _transfer(ranks: list[_Rank], transfers: dict[int, Transfer], garbage: float) -> None:
    level = {transfer.level for transfer in transfers.values()}
    assert len(level) == 1
    waiting = {r: [one for one in transfer.collectives if isinstance(one, Raw)] for r, transfer in transfers.items()}
    raws = any(waiting.values())
    while any(waiting.values()):  # a rank takes one after the other; so all members have to have come to one
        raw = next((own[0] for own in waiting.values() if own and all(waiting[member][:1] == own[:1] for member in own[0].members)), None)
        assert raw is not None, f"ranks wait for each other: {waiting}"
        for member in raw.members:
            waiting[member].pop(0)
        _raw(ranks, raw, garbage)
    arrived: dict[int, dict[Range, list[Values]]] = {r: {} for r in range(len(ranks))}
    for r, transfer in transfers.items():
        for one in transfer.collectives:
            if isinstance(one, Exchange):
                _receive(ranks, transfers, r, one, arrived[r])
    if not raws:
        for rank, payloads in zip(ranks, arrived.values(), strict=True):
            rank.payloads = payloads


def _receive(
    ranks: list[_Rank], transfers: dict[int, Transfer], receiver: int, exchange: Exchange, arrived: dict[Range, list[Values]]
) -> None:
    for sender, pieces in zip(exchange.members, exchange.receives, strict=True):
        if pieces:
            sent = [
                one.sends[exchange.members.index(receiver)]
                for one in transfers[sender].collectives
                if isinstance(one, Exchange) and one.members == exchange.members
            ]
            assert pieces in sent, f"rank {receiver} expects {pieces} of {sender}, which sends {sent}"
        for piece in pieces:
            payloads = ranks[sender].payloads[piece.range]
            assert len(payloads) == piece.payloads
            arrived.setdefault(piece.range, []).extend(payloads)


def _raw(ranks: list[_Rank], raw: Raw, garbage: float) -> None:
    lo, hi = raw.region
    total = sum(ranks[member].array[lo:hi] for member in raw.members)
    before = {member: ranks[member].array[lo:hi].copy() for member in raw.members}
    for index, member in enumerate(raw.members):
        own = ranks[member].array[lo:hi]
        own[:] = garbage
        if raw.op == "all_reduce" or (raw.op == "reduce" and index == raw.root):
            own[:] = total
        elif raw.op == "broadcast":
            own[:] = before[raw.members[raw.root]]
        elif raw.op == "reduce_scatter":
            a, b = raw.cuts[index] - lo, raw.cuts[index + 1] - lo
            own[a:b] = total[a:b]
        elif raw.op == "all_gather":
            for i, other in enumerate(raw.members):
                a, b = raw.cuts[i] - lo, raw.cuts[i + 1] - lo
                own[a:b] = before[other][a:b]
