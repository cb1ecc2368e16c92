"""Compiles an option to a program for each rank. Pure.

The option's actions are compiled for all ranks together, because what one rank receives is what others hold. A rank's *holding* is either floats
of some ranges of the part, or payloads of some pieces. The first step of a sum in two steps (reduce_scatter, reduce, all_to_all, gather) makes the
holding smaller, the second step makes it whole again; a rank that holds nothing in between does nothing until a broadcast. For a push, the contributors
to a piece hold the sums over different ranks; servers add these, and every contributor pulls the sum over all ranks.
``psgc.plan.model.options`` has the grammar of options.

A payload cannot be cut. So a range is encoded in several pieces if its payloads will go to different ranks before they are decoded. After a sum between
nodes, ranks of several nodes hold the same sum. They cut it at the ends of each other's ranges as well. So they encode the same pieces, even if their
nodes differ in size, and all ranks end with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from psgc.errors import UsageError
from psgc.program.ranks import Range, Ranks, cuts, pieces_of
from psgc.program.steps import (
    LEVELS,
    Agree,
    Decode,
    Encode,
    EncodedOp,
    Exchange,
    Level,
    Piece,
    Program,
    Raw,
    RawOp,
    Serve,
    Step,
    Transfer,
)

_RAW: Final[tuple[RawOp, ...]] = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
_ENCODED: Final[tuple[EncodedOp, ...]] = ("all_to_all", "gather", "all_gather", "broadcast")


@dataclass(slots=True)
class _Holding:
    """What one rank holds. summed: the ranks whose contributions it is the sum of; ranges: its ranges of floats, ascending and disjoint; pieces: its
    payloads by range, each with the slot of the encode that wrote it."""

    summed: frozenset[int]
    ranges: tuple[Range, ...]
    pieces: dict[Range, Piece] = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def compile_option(option: tuple[str, ...], numel: int, ranks: Ranks, turn: int = 0) -> tuple[Program, ...]:
    """The programs of all ranks, by rank. turn: index of the root in collectives that have one, modulo the number of ranks, so that roots differ
    between buckets. Raises UsageError for an unknown action, and for an option that would not give every rank the sum."""
    walk = _Walk(option, numel, ranks, turn)
    for action in range(len(option)):
        walk.take(action)
    encodes = sum(action.startswith("comp@") for action in option)
    has_servers = any(op_of(action) == "push" for action in option)
    return tuple(Program(numel, (*steps, Agree(len(option))), encodes, has_servers) for steps in walk.steps)


def renumbered(program: Program, members: Sequence[int]) -> Program:
    """The program of one of some of a job's ranks, which were numbered from 0 on when it was compiled, with the job's own numbers."""
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Encode):
            steps.append(replace(step, leaders=tuple(members[leader] for leader in step.leaders)))
        elif isinstance(step, Transfer):
            of = tuple(replace(one, members=tuple(members[member] for member in one.members)) for one in step.collectives)
            steps.append(replace(step, collectives=of))
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


class _Walk:
    def __init__(self, option: Sequence[str], numel: int, ranks: Ranks, turn: int) -> None:
        self.option, self.numel, self.ranks, self.turn = option, numel, ranks, turn
        self.steps: list[list[Step]] = [[] for _ in ranks.everybody]
        self.holdings = [_Holding(frozenset([rank]), ((0, numel),)) for rank in ranks.everybody]
        self.slots = 0
        # Whether each of a node's ranks holds a shard between the two steps within the node. Otherwise one of them holds everything.
        self.sharded = any(action.removesuffix(".c") in ("intra.reduce_scatter", "intra.all_to_all") for action in option)

    def take(self, action: int) -> None:
        """Add the next action's steps."""
        text = self.option[action]
        kind, at, device = text.partition("@")
        if at and kind == "comp":
            self._encode(action, device)
        elif at:
            self._decode(action, device)
        elif op_of(text) == "push":
            self._serve(action, text)
        elif op_of(text) == "pull":
            if action == 0 or self.option[action - 1] != text.replace("pull", "push"):
                raise UsageError(f"action {text!r} takes what the push before it asked for; put {text.replace('pull', 'push')} before it")
        else:
            self._transfer(action, text)

    def _encode(self, action: int, device: str) -> None:
        parted = self._places(action)
        ends: dict[frozenset[int], set[int]] = {}  # of the ranges that ranks hold of a sum
        for holding in self.holdings:
            ends.setdefault(holding.summed, set()).update(place for one in holding.ranges for place in one)
        leaders: dict[tuple[Range, frozenset[int]], int] = {}
        for rank, holding in enumerate(self.holdings):
            pieces = tuple(piece for one in holding.ranges for piece in pieces_of(parted | ends[holding.summed], one))
            if pieces:
                led = tuple(leaders.setdefault((piece, holding.summed), rank) for piece in pieces)
                self.steps[rank].append(Encode(action, self.slots, device, led, pieces))
            holding.pieces = {piece: Piece(piece, 1, self.slots) for piece in pieces}
            holding.ranges = ()
        self.slots += 1

    def _places(self, action: int) -> set[int]:
        """Offsets at which what is encoded now must be cut, because the pieces will be sent to different ranks before they are decoded."""
        places: set[int] = set()
        for text in self.option[action + 1 :]:
            if text.startswith("decomp@"):
                break
            level, _, op = text.removesuffix(".c").partition(".")
            if level == "flat" and op == "all_to_all":
                places.update(cuts(0, self.numel, self.ranks.size))
            if level == "inter" or (level == "intra" and op == "all_to_all"):
                places.update(place for atom in self._atoms() for place in atom)
            if level == "inter" and op == "all_to_all":
                places.update(place for atom in self._atoms() for place in cuts(*atom, self.ranks.nodes))
        return places

    def _decode(self, action: int, device: str) -> None:
        for rank, holding in enumerate(self.holdings):
            pieces = sorted(holding.pieces.values(), key=lambda piece: piece.range)
            if pieces:
                self.steps[rank].append(
                    Decode(action, pieces[0].slot, device, tuple(p.range for p in pieces), tuple(p.payloads for p in pieces))
                )
            holding.ranges, holding.pieces = _joined([piece.range for piece in pieces]), {}

    def _transfer(self, action: int, text: str) -> None:
        encoded = text.endswith(".c")
        level_text, _, op = text.removesuffix(".c").partition(".")
        level = next((one for one in LEVELS if one == level_text), None)
        if level is None or op not in (_ENCODED if encoded else _RAW):
            raise UsageError(f"action {text!r} is neither a collective nor a push or pull, so no program has it")
        collectives: list[list[Raw | Exchange]] = [[] for _ in self.ranks.everybody]
        arrived: list[dict[Range, Piece]] = [{} for _ in self.ranks.everybody]
        for members, region in self._groups(level):
            if encoded:
                exchanged = next(one for one in _ENCODED if one == op)
                self._exchange(level, exchanged, members, region, collectives, arrived, self._on_gpus(action))
            else:
                self._raw(level, next(raw for raw in _RAW if raw == op), members, region, collectives)
        for rank, found in enumerate(collectives):
            if encoded:
                self.holdings[rank].pieces = arrived[rank]
            if found:
                self.steps[rank].append(Transfer(action, level, tuple(found)))

    def _serve(self, action: int, text: str) -> None:
        """Compile a push and the pull after it. A server sums the contributions to each piece, so together they must contain every rank's gradient
        exactly once."""
        encoded, flat = text.endswith(".c"), text.startswith("flat.")
        if self.option[action + 1 : action + 2] != (text.replace("push", "pull"),):
            raise UsageError(f"action {text!r} is to be followed by {text.replace('push', 'pull')}, which takes its result")
        places = {place for atom in self._atoms() for place in atom} if not flat else set()
        summed: dict[Range, list[frozenset[int]]] = {}
        for rank, holding in enumerate(self.holdings):
            pieces = tuple(sorted(holding.pieces)) if encoded else tuple(p for one in holding.ranges for p in pieces_of(places, one))
            slots = {piece.slot for piece in holding.pieces.values()} if encoded else set[int | None]([None])
            if not pieces:
                continue
            if slots - {0, None} or any(piece.payloads > 1 for piece in holding.pieces.values()):
                raise UsageError(
                    f"action {text!r} pushes what an encode has made of one sum, before any other; servers take no other payloads"
                )
            self.steps[rank].append(Serve(action, slots.pop(), pieces))
            for piece in pieces:
                summed.setdefault(piece, []).append(holding.summed)
            holding.summed = frozenset(self.ranks.everybody)
            holding.pieces = {piece: Piece(piece, 1, self.slots) for piece in pieces} if encoded else {}
            holding.ranges = () if encoded else _joined(pieces)
        self.slots += encoded
        for piece, contributions in summed.items():
            if sorted(rank for one in contributions for rank in one) != list(self.ranks.everybody):
                raise UsageError(f"action {text!r} would not push each rank's contribution to elements {list(piece)} once")

    def _atoms(self) -> tuple[Range, ...]:
        """The slices that are summed between the nodes, each by a group of one rank of every node."""
        return self.ranks.atoms(self.numel) if self.sharded else ((0, self.numel),)

    def _groups(self, level: Level) -> list[tuple[tuple[int, ...], Range]]:
        """The groups of the level's collectives, each with its region of the part."""
        ranks, whole = self.ranks, (0, self.numel)
        if level == "flat":
            return [(ranks.everybody, whole)]
        if level == "intra":
            return [(ranks.on_node(node), whole) for node in range(ranks.nodes)]
        if self.sharded:
            return [(ranks.owners(self.numel, atom), atom) for atom in self._atoms()]
        return [(tuple(members[self._root("intra", members)] for members in map(ranks.on_node, range(ranks.nodes))), whole)]

    def _root(self, level: Level, members: Sequence[int]) -> int:
        """Index of the root among the members; within a node it is one of the node's reduction roots."""
        if level == "intra":
            roots = self.ranks.roots_of(self.ranks.node_of[members[0]])
            return roots[self.turn % len(roots)]
        return self.turn % len(members)

    def _slices(self, level: Level, members: Sequence[int], region: Range) -> tuple[Range, ...]:
        """Each member's slice of the region."""
        if level == "intra":
            return self.ranks.shards(self.ranks.node_of[members[0]], self.numel)
        return tuple(pairwise(cuts(*region, len(members))))

    def _raw(self, level: Level, op: RawOp, members: tuple[int, ...], region: Range, collectives: list[list[Raw | Exchange]]) -> None:
        root, slices = self._root(level, members), self._slices(level, members, region)
        switch = self.ranks.switch_of(self.ranks.node_of[members[0]]) if level == "intra" else 0
        before = [self.holdings[rank].summed for rank in members]
        summed = before[root] if op == "broadcast" else frozenset[int]().union(*before)
        if switch and op != "all_reduce":
            self._by_switch(op, members, switch, root, collectives)
        else:
            step = _collective(op, members, region, (*(lo for lo, _ in slices), region[1]), root)
            for rank in members:
                collectives[rank].append(step)
        for index, rank in enumerate(members):
            if op == "reduce_scatter":
                held: Range | None = slices[index]
            elif op == "reduce":
                held = region if index == root else None
            else:
                held = region
            holding = self.holdings[rank]
            holding.summed = summed
            holding.ranges = _joined([*_without(holding.ranges, region), *([held] if held is not None else [])])

    def _by_switch(self, op: RawOp, members: tuple[int, ...], switch: int, root: int, collectives: list[list[Raw | Exchange]]) -> None:
        """Compile a node's collective in two stages: among the ranks behind each switch, and among the ranks at the same place behind different switches.
        Sums run behind the switches first; gathers and broadcasts run there last."""
        whole = (0, self.numel)
        behind = [members[first : first + switch] for first in range(0, len(members), switch)]
        within = [_collective(op, group, whole, cuts(*whole, switch), root % switch) for group in behind]
        between = []
        for place, region in enumerate(pairwise(cuts(*whole, switch))):
            peers = members[place::switch]
            if op in ("reduce_scatter", "all_gather"):
                between.append(_collective(op, peers, region, cuts(*region, len(peers)), 0))
            elif place == root % switch:
                between.append(_collective(op, peers, whole, (), root // switch))
        for stage in (within, between) if op in ("reduce_scatter", "reduce") else (between, within):
            for step in stage:
                for rank in step.members:
                    collectives[rank].append(step)

    def _on_gpus(self, action: int) -> bool:
        """Whether payloads that the action moves are encoded on GPUs, or come from servers for such, and are decoded there."""
        before = [text for text in self.option[:action] if text.startswith("comp@")]
        after = [text for text in self.option[action:] if text.startswith("decomp@")]
        return before[-1:] == ["comp@gpu"] and after[:1] == ["decomp@gpu"]

    def _exchange(
        self, level: Level, op: EncodedOp, members: tuple[int, ...], region: Range, collectives: list[list[Raw | Exchange]],
        arrived: list[dict[Range, Piece]], on_gpu: bool,
    ) -> None:  # fmt: skip
        slices, root = self._slices(level, members, region), self._root(level, members)
        moves: list[list[tuple[Piece, ...]]] = []  # what each sender (rows) sends to each receiver (columns)
        summed = [self.holdings[rank].summed for rank in members]
        for index, rank in enumerate(members):
            own = tuple(p for p in sorted(self.holdings[rank].pieces.values(), key=lambda p: p.range) if _inside(p.range, region))
            to: list[tuple[Piece, ...]] = []
            for other in range(len(members)):
                if op == "all_to_all":
                    to.append(tuple(p for p in own if _inside(p.range, slices[other])))
                elif op == "gather":
                    to.append(own if other == root else ())
                elif op == "broadcast":
                    to.append(own if index == root else ())
                else:
                    to.append(own)
            moves.append(to)
        for index, rank in enumerate(members):
            receives = tuple(moves[sender][index] for sender in range(len(members)))
            if any(receives):
                self.holdings[rank].summed = frozenset[int]().union(*(one for one, pieces in zip(summed, receives, strict=True) if pieces))
            if any(any(to) for to in moves):  # a member with nothing to send or receive takes part, as groups on GPUs want it
                collectives[rank].append(Exchange(op, members, tuple(moves[index]), receives, on_gpu))
            for pieces in receives:
                for piece in pieces:
                    before = arrived[rank].get(piece.range)
                    assert before is None or before.slot == piece.slot
                    arrived[rank][piece.range] = Piece(piece.range, piece.payloads + (before.payloads if before else 0), piece.slot)


def _collective(op: RawOp, members: tuple[int, ...], region: Range, places: tuple[int, ...], root: int) -> Raw:
    """The record of a collective of floats. places: the cuts of the members' slices, for operations that have slices; root: the root's index among the
    members, for operations that have a root."""
    sliced = op in ("reduce_scatter", "all_gather")
    return Raw(op, members, region, places if sliced else (), 0 if sliced else root)


def op_of(action: str) -> str:
    """The action's operation: push, all_gather, ...; "" for an encode or decode."""
    return action.removesuffix(".c").partition(".")[2]


def _inside(one: Range, region: Range) -> bool:
    return region[0] <= one[0] and one[1] <= region[1]


def _without(ranges: Sequence[Range], region: Range) -> list[Range]:
    """The parts of the ranges that lie outside the region."""
    lo, hi = region
    sides = [(a, b) for first, last in ranges for a, b in ((first, min(last, lo)), (max(first, hi), last))]
    return [(a, b) for a, b in sides if a < b]


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges in ascending order, without empty ones; adjacent ones are joined."""
    joined: list[Range] = []
    for lo, hi in sorted(ranges):
        if lo == hi:
            continue
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return tuple(joined)
