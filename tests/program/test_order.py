"""Seeded simulation: every rank keeps to one order of transfers, whatever is ready first, and no rank ever waits for ever."""

from __future__ import annotations

import os
import random

import pytest

from psgc.errors import LocalProtocolError, UsageError
from psgc.plan.model.options import Option, all_options
from psgc.program.compile import compile_option
from psgc.program.order import Turn, issued, ordered, pipelined
from psgc.program.ranks import Ranks
from psgc.program.run import Runner, Start
from psgc.program.steps import Agree, Transfer

OPTIONS = all_options()
SEEDS = int(os.environ.get("PSGC_TEST_SEEDS", "1000"))


def _any_order(options: list[Option], random_: random.Random) -> tuple[Turn, ...]:
    """A random merge of the parts' transfers."""
    left = {c: list(issued(option)) for c, option in enumerate(options)}
    turns = []
    while left:
        chain = random_.choice(sorted(left))
        turns.append(Turn(chain, left[chain].pop(0)))
        if not left[chain]:
            del left[chain]
    return tuple(turns)


class _Job:
    """Ranks with a Runner each. A collective is over for everybody once every member has come to it; computation is over whenever."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = Ranks(self.random.choice([(2, 2), (1, 2, 3), (2,), (1, 1), (3, 1), (1, 1, 1), (2, 2, 2)]))
        options = [self.random.choice(OPTIONS) for _ in range(self.random.randint(1, 5))]
        self.options = options
        order = pipelined(options) if self.random.random() < 0.5 else _any_order(options, self.random)
        numel = self.random.choice([1, 5, 60])
        programs = [compile_option(option, numel, self.ranks, chain) for chain, option in enumerate(options)]
        self.runners = [Runner([chain[rank] for chain in programs], order) for rank in self.ranks.everybody]
        self.steps = [[0] * len(options) for _ in self.ranks.everybody]  # of the layout, that each rank's chains have begun
        self.met: dict[tuple[object, ...], set[int]] = {}  # who has come to a collective
        self.running: list[tuple[int, Start, int]] = []  # rank, what, collectives of it that are over
        self.through = 0

    def run(self, steps: int) -> None:
        """So many steps of the layout."""
        total = steps * len(self.options) * self.ranks.size
        while self.through < total:
            moves = [*self._begins(steps), *self._ends()]
            assert moves, f"no rank can go on: {[runner.waiting() for runner in self.runners]}"
            self.random.choice(moves)()

    def _begins(self, steps: int) -> list:  # type: ignore[type-arg]
        """Parts that can be submitted: the trainer submits a step's parts in any order, and the next step's when all are through."""
        found = []
        for rank, taken in enumerate(self.steps):
            over = all(at is None for at in self.runners[rank]._at)
            for chain, step in enumerate(taken):
                if step < steps and (step == min(taken) if min(taken) != max(taken) else over):
                    found.append(lambda rank=rank, chain=chain: self._begin(rank, chain))
        return found

    def _begin(self, rank: int, chain: int) -> None:
        self.steps[rank][chain] += 1
        self._start(rank, self.runners[rank].begin(chain))

    def _start(self, rank: int, starts: list[Start]) -> None:
        for start in starts:
            self.running.append((rank, start, 0))
            self._come(rank, start, 0)

    def _come(self, rank: int, start: Start, number: int) -> None:
        self.met.setdefault(self._meeting(rank, start, number), set()).add(rank)

    def _meeting(self, rank: int, start: Start, number: int) -> tuple[object, ...]:
        step = self.steps[rank][start.chain]
        members = self._members(start, number)
        return step, start.chain, start.step.action, members

    def _members(self, start: Start, number: int) -> tuple[int, ...]:
        if isinstance(start.step, Agree):
            return self.ranks.everybody
        return start.step.collectives[number].members if isinstance(start.step, Transfer) else ()

    def _ends(self) -> list:  # type: ignore[type-arg]
        found = []
        for entry in self.running:
            rank, start, number = entry
            if self.met[self._meeting(rank, start, number)] >= set(self._members(start, number)):
                found.append(lambda entry=entry: self._end(entry))
        return found

    def _end(self, entry: tuple[int, Start, int]) -> None:
        rank, start, number = entry
        self.running.remove(entry)
        if isinstance(start.step, Transfer) and number + 1 < len(start.step.collectives):
            self.running.append((rank, start, number + 1))
            self._come(rank, start, number + 1)
            return
        starts, through = self.runners[rank].over(start.chain)
        self.through += through
        self._start(rank, starts)


def test_no_order_of_readiness_makes_ranks_wait_for_ever() -> None:
    for seed in range(SEEDS):
        _Job(seed).run(steps=2)


def test_ranks_that_keep_to_different_orders_are_caught_by_the_simulation() -> None:
    """The check above can fail."""
    stuck = 0
    for seed in range(40):
        job = _Job(seed)
        if len(job.options) < 2:
            continue
        order = _any_order(job.options, random.Random(seed))
        numel = 60
        programs = [compile_option(option, numel, job.ranks, chain) for chain, option in enumerate(job.options)]
        job.runners[0] = Runner([chain[0] for chain in programs], order)
        try:
            job.run(steps=1)
        except AssertionError:
            stuck += 1
    assert stuck > 5


def test_turns_that_a_plan_gives_are_kept_and_those_of_other_options_refused() -> None:
    options = [("flat.reduce_scatter", "flat.all_gather"), ("flat.all_reduce",)]
    assert ordered(options, [(0, 3, 5), (1, 2)]) == (Turn(0, 0), Turn(1, 0), Turn(1, 1), Turn(0, 1), Turn(0, 2))
    for wrong in [(0, 3), (3, 0, 5)]:
        with pytest.raises(UsageError, match="the turns of part 0 are"):
            ordered(options, [wrong, (1, 2)])


def test_a_part_begins_once_a_step() -> None:
    programs = compile_option(("flat.all_reduce",), 4, Ranks((2,)))
    runner = Runner([programs[0]], pipelined([("flat.all_reduce",)]))
    assert [start.chain for start in runner.begin(0)] == [0]
    with pytest.raises(LocalProtocolError, match="under way"):
        runner.begin(0)


def test_links_of_two_levels_work_at_the_same_time_in_the_default_order() -> None:
    option = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    ranks = Ranks((2, 2))
    programs = [compile_option(option, 8, ranks)[0] for _ in range(2)]
    runner = Runner(programs, pipelined([option, option]))
    assert len(runner.begin(0)) == 1
    assert runner.begin(1) == []
    starts, _ = runner.over(0)
    assert [(start.chain, start.step.action) for start in starts] == [(0, 1), (1, 0)]
