"""The steps that one rank runs for one part: the records that ``compile`` makes and an executor runs. Pure.

A rank has one array of the whole part, and *payloads* of *pieces* of it (ranges of elements). A piece may have several payloads, which are summed when
they are decoded. A transfer of floats works on the array in place. A transfer of payloads sends some of the rank's payloads, and adds the received ones
to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from psgc.program.ranks import Range

Level = Literal["flat", "intra", "inter"]
LEVELS: Final[tuple[Level, ...]] = ("flat", "intra", "inter")
RawOp = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
EncodedOp = Literal["all_to_all", "gather", "all_gather", "broadcast"]


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode each of these pieces of the array. slot: the number of encodes before this one in the option; each slot has its own residual.

    leaders: for each piece, the first of the ranks that encode it from the same sum; ranks of several nodes do so after an inter-node sum. Their payloads
    must be equal, so all of them draw the leader's random numbers. Their residuals are equal and count once, as the leader's."""

    action: int
    slot: int
    device: str
    leaders: tuple[int, ...]
    pieces: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the payloads of each piece, and write their sum to the array. slot: that of the encode that wrote them; counts: the number of payloads of
    each piece."""

    action: int
    slot: int
    device: str
    pieces: tuple[Range, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """One collective of floats over some ranks. cuts: the bounds of the members' slices of ``region``, counted from the part's beginning; root: the root's
    index among the members, for reduce and broadcast."""

    op: RawOp
    members: tuple[int, ...]
    region: Range
    cuts: tuple[int, ...] = ()
    root: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some payloads of one piece, which travel together. slot: that of the encode that wrote them."""

    range: Range
    payloads: int
    slot: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send payloads to, and receive payloads from, each member. sends: the pieces whose payloads go to each member, in order, with those that the rank
    keeps in its own entry; receives: the pieces whose payloads come from each member. The rank loses all payloads that it had, except those that it
    sent to itself. on_gpu: whether the option encodes these payloads on GPUs and decodes them there."""

    op: EncodedOp
    members: tuple[int, ...]
    sends: tuple[tuple[Piece, ...], ...]
    receives: tuple[tuple[Piece, ...], ...]
    on_gpu: bool = False

    @property
    def root(self) -> int:
        """The member whose payloads a broadcast hands out."""
        return next(member for member, pieces in enumerate(self.receives) if pieces)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One action over links: its collectives over the groups that this rank is in, one after the other."""

    action: int
    level: Level
    collectives: tuple[Raw | Exchange, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Push pieces to servers, and pull the results. Each piece is a key, and a server sums its contributions. slot: that of the encode that wrote the
    pieces' payloads, whose results are payloads, too; None: the pieces are floats, and the results are written to the array."""

    action: int
    slot: int | None
    pieces: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Agree:
    """The last step: all ranks reduce a control word. It says whether any rank contributed, met a NaN or infinity, or did not apply the last step.
    Residuals are committed only afterwards."""

    action: int


Step = Encode | Decode | Transfer | Serve | Agree
Lane = Level | Literal["control"]
LANES: Final[tuple[Lane, ...]] = (*LEVELS, "control")


def lane_of(step: Step) -> Lane | None:
    """The lane whose turn the step waits for: that of its level's links, or that of the control words. None for computations, and for servers, which take
    contributions in any order."""
    if isinstance(step, Transfer):
        return step.level
    return "control" if isinstance(step, Agree) else None


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's steps for one part. There is no step for an action in which the rank has nothing to do. encodes: the option's number of encodes;
    has_servers: whether the option has a push, so that servers take the mean."""

    numel: int
    steps: tuple[Step, ...]
    encodes: int
    has_servers: bool = False

    @property
    def transfers(self) -> Iterator[Transfer]:
        """The transfers that this rank takes part in."""
        return (step for step in self.steps if isinstance(step, Transfer))

    @property
    def served(self) -> Iterator[Range]:
        """The pieces that this rank pushes to servers."""
        return (piece for step in self.steps if isinstance(step, Serve) for piece in step.pieces)


def same_pieces(programs: Sequence[Program]) -> dict[int, bool]:
    """For each slot from 1 on, whether every rank encodes there only pieces that it has also encoded in the slot before, so that it encodes sums of
    payloads of these very pieces. programs: those of all ranks, for one part."""
    found: dict[int, bool] = {}
    for program in programs:
        before: set[Range] = set()
        for step in (step for step in program.steps if isinstance(step, Encode)):
            if step.slot:
                found[step.slot] = found.get(step.slot, True) and before.issuperset(step.pieces)
            before = set(step.pieces)
    return found
