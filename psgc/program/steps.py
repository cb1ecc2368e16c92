"""What one rank does for one part, step by step: the records that compiling an option makes and that an executor runs. Pure.

A rank has one array of the whole part, and *payloads* of *pieces* of it (ranges of elements): lists, since a piece may wait to be summed. A
transfer of floats works on the array in place; one of payloads takes some of this rank's, and adds what comes to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from psgc.program.ranks import Range

Level = Literal["flat", "intra", "inter"]
LEVELS: Final[tuple[Level, ...]] = ("flat", "intra", "inter")
RawOp = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode each of these pieces of the array. slot: how many encodes the option has before this one; its residual is of this slot.

    leader: the first of the ranks that encode the same pieces of the same sum, as the ranks of several nodes do that have all summed it. Their
    payloads must be equal, so they draw the leader's random numbers; and what they keep counts once, as the leader's."""

    action: int
    slot: int
    device: str
    leader: int
    pieces: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the payloads of each piece, the sum of them into the array. slot: of the encode that wrote them; counts: payloads of each piece."""

    action: int
    slot: int
    device: str
    pieces: tuple[Range, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """One collective of floats over some ranks. cuts: of ``region``, where the members' slices begin and the last ends, from the part's
    begin; root: a member's place, of reduce and broadcast."""

    op: RawOp
    members: tuple[int, ...]
    region: Range
    cuts: tuple[int, ...] = ()
    root: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some payloads of one piece, which travel together. slot: of the encode that wrote them."""

    range: Range
    payloads: int
    slot: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Payloads to and from each member. sends: by member, all payloads of these pieces, as they are in order, its own place too where the
    payloads stay; receives: by member, what comes. What a rank had is gone afterwards, but for what it sent to itself."""

    members: tuple[int, ...]
    sends: tuple[tuple[Piece, ...], ...]
    receives: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One action over links: its collectives over the groups that this rank is in, one after the other."""

    action: int
    level: Level
    collectives: tuple[Raw | Exchange, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Contribute pieces to servers, and take their results: each piece is a key, of which a server sums what all contributors push. slot: of the
    encode that wrote the pieces' payloads, and the results are payloads, too; None: floats go as they are, and come into the array."""

    action: int
    slot: int | None
    pieces: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Agree:
    """The last step: all ranks reduce a control word, whether somebody contributed, met a NaN or infinity, or did not apply the last step. Only
    then is anything committed."""

    action: int


Step = Encode | Decode | Transfer | Serve | Agree
Lane = Level | Literal["control"]
LANES: Final[tuple[Lane, ...]] = (*LEVELS, "control")


def lane_of(step: Step) -> Lane | None:
    """Whose turn the step waits for: that of its level's links, or of the control words; None for computation, and for servers, which take
    contributions in any order."""
    if isinstance(step, Transfer):
        return step.level
    return "control" if isinstance(step, Agree) else None


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's steps for one part; an action in which the rank has nothing to do has none. encodes: of the option; has_servers: whether the option
    has a push, by whichever ranks: servers then take the mean."""

    numel: int
    steps: tuple[Step, ...]
    encodes: int
    has_servers: bool = False

    @property
    def transfers(self) -> Iterator[Transfer]:
        """Those that this rank takes part in."""
        return (step for step in self.steps if isinstance(step, Transfer))

    @property
    def served(self) -> Iterator[Range]:
        """The pieces that this rank contributes to servers."""
        return (piece for step in self.steps if isinstance(step, Serve) for piece in step.pieces)


def same_pieces(programs: Sequence[Program]) -> dict[int, bool]:
    """By slot from 1 on: whether each rank encodes there only pieces that it has encoded in the slot before, and so sums of payloads of these very pieces;
    programs: of all ranks, for one part."""
    found: dict[int, bool] = {}
    for program in programs:
        before: set[Range] = set()
        for step in (step for step in program.steps if isinstance(step, Encode)):
            if step.slot:
                found[step.slot] = found.get(step.slot, True) and before.issuperset(step.pieces)
            before = set(step.pieces)
    return found
