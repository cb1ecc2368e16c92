"""Decides which steps a rank may start next, from what has become ready and what is over. Pure.

A *chain* is the program of one part. A computation starts when the step before it in the chain is over. In a ``Runner`` a transfer also waits for its turn:
each lane runs one transfer at a time, in the order that all ranks follow (``order``), which begins again with each step of the layout. ``InTurn`` runs
all steps of a bucket one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from psgc.errors import LocalProtocolError
from psgc.program.order import Turn
from psgc.program.steps import Agree, Lane, Program, Step, lane_of


class Start(NamedTuple):
    """A step to begin now. When it is over, call ``Runner.over`` with its chain."""

    chain: int
    step: Step


class Runner:
    """See the module's text. programs: this rank's, by chain; order: the order of all transfers, also of those in which this rank takes no part."""

    def __init__(self, programs: Sequence[Program], order: Sequence[Turn]) -> None:
        self._programs = programs
        self._at: list[int | None] = [None] * len(programs)  # the step that runs or waits; None between two steps of the layout
        self._running = [False] * len(programs)
        own: dict[Turn, Step] = {Turn(c, step.action): step for c, program in enumerate(programs) for step in program.steps}
        self._turns: dict[Lane, list[int]] = {}  # chains in the lane's order
        for turn in order:
            step = own.get(turn)
            lane = None if step is None else lane_of(step)
            if lane is not None:
                self._turns.setdefault(lane, []).append(turn.chain)
        self._next: dict[Lane, int] = dict.fromkeys(self._turns, 0)
        self._busy: set[Lane] = set()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes on which this rank has transfers."""
        return tuple(self._turns)

    def begin(self, chain: int) -> list[Start]:
        """Begin the part's next step of the layout: its gradient is ready, or this rank skips it. Returns what can start."""
        if self._at[chain] is not None:
            raise LocalProtocolError(f"part {chain} is under way; its next step begins when this one is over")
        self._at[chain] = 0
        return self._startable(chain)

    def over(self, chain: int) -> tuple[list[Start], list[int]]:
        """Note that the chain's running step is over. Returns what can start, and the chains that are finished."""
        at = self._at[chain]
        if at is None or not self._running[chain]:
            raise LocalProtocolError(f"part {chain} runs no step that could be over")
        steps = self._programs[chain].steps
        self._running[chain] = False
        started: list[Start] = []
        lane = lane_of(steps[at])
        through = at + 1 == len(steps)
        self._at[chain] = None if through else at + 1
        if lane is not None:
            self._busy.discard(lane)
            self._next[lane] = (self._next[lane] + 1) % len(self._turns[lane])
        if not through:
            started += self._startable(chain)
        if lane is not None:
            started += self._startable(self._turns[lane][self._next[lane]])
        return started, [chain] if through else []

    def agreeing(self, chain: int) -> Collection[int]:
        """The chains whose control words are exchanged in this chain's ``Agree``."""
        return (chain,)

    def waiting(self) -> list[tuple[int, Step]]:
        """The steps that wait for their turn, by chain, for error messages."""
        return [
            (c, self._programs[c].steps[at]) for c, at in enumerate(self._at) if at is not None and not self._running[c]
        ]  # fmt: skip

    def _startable(self, chain: int) -> list[Start]:
        at = self._at[chain]
        if at is None or self._running[chain]:
            return []
        step = self._programs[chain].steps[at]
        lane = lane_of(step)
        if lane is not None and (lane in self._busy or self._turns[lane][self._next[lane]] != chain):
            return []
        if lane is not None:
            self._busy.add(lane)
        self._running[chain] = True
        return [Start(chain, step)]


class InTurn:
    """One bucket's steps, one after the other, and one control word for all of its parts at the end. Where all of a rank's buckets run so, one at a time and in
    an order that all ranks follow, they need no other lanes. programs: this rank's; first: the first one's chain."""

    def __init__(self, programs: Sequence[Program], first: int) -> None:
        self._chains = range(first, first + len(programs))
        of = list(zip(self._chains, programs, strict=True))
        steps = [Start(chain, step) for chain, program in of for step in program.steps if not isinstance(step, Agree)]
        self._steps = [*steps, Start(self._chains[-1], programs[-1].steps[-1])]
        self._at: int | None = None  # the step that runs; None between two steps of the layout

    def begin(self, chain: int) -> list[Start]:
        """As ``Runner.begin``; all begin with the first one."""
        if chain != self._chains[0]:
            return []
        if self._at is not None:
            raise LocalProtocolError(f"part {chain} is under way; its next step begins when this one is over")
        self._at = 0
        return self._steps[:1]

    def over(self, chain: int) -> tuple[list[Start], list[int]]:
        """As ``Runner.over``."""
        if self._at is None or self._steps[self._at].chain != chain:
            raise LocalProtocolError(f"part {chain} runs no step that could be over")
        self._at += 1
        if self._at < len(self._steps):
            return [self._steps[self._at]], []
        self._at = None
        return [], list(self._chains)

    def agreeing(self, chain: int) -> Collection[int]:
        """As ``Runner.agreeing``: all of them."""
        return self._chains
