"""Seeded simulation: every rank keeps to one order of transfers, whatever is ready first, and no rank ever waits for ever."""

from __future__ import annotations

import os
import random

import pytest

from psgc.errors import LocalProtocolError, UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.plan.model.options import Option, all_options, server_options
from psgc.program.compile import compile_option
from psgc.program.order import Turn, issued, ordered, pipelined
from psgc.program.ranks import Ranks
from psgc.program.run import InTurn, Runner, Start
from psgc.program.steps import Agree, Serve, Transfer

OPTIONS = all_options()
OVER_SERVERS = tuple(option for option in server_options() if option[0].startswith("intra"))
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


def _layout(options: list[Option], order: tuple[Turn, ...], numel: int, ranks: Ranks) -> Layout:
    """A tensor for each option, whose transfers have their turns in this order."""
    tensors = tuple(TensorSpec(f"t{chain}", (numel,), "float32") for chain in range(len(options)))
    buckets = tuple(
        BucketSpec((chain,), "none", -chain, 1, option=option, turns=tuple(n for n, turn in enumerate(order) if turn.chain == chain))
        for chain, option in enumerate(options)
    )
    declaration = Declaration("gradients", "plan", tensors, "none", True, buckets=buckets)
    return build_layout(declaration, layout_id=1, servers=2, workers=ranks.size, ranks=ranks)


class _Servers:
    """Two servers, each with room for one key at a time: contributions to others wait in the worker."""

    def __init__(self, layout: Layout) -> None:
        self.keys: dict[tuple[int, tuple[int, int]], tuple[int, ...]] = {}  # the contributors to each piece of each chain
        windows: dict[int, list[tuple[int, tuple[int, tuple[int, int]]]]] = {}
        everybody = tuple(range(layout.workers))
        for bucket in layout.buckets:
            for key in bucket.keys:
                where = bucket.index, (key.offset, key.offset + key.numel)
                self.keys[where] = key.contributors or everybody
                windows.setdefault(key.server, []).append((key.position, where))
        self.windows = [[where for _, where in sorted(window)] for window in windows.values()]
        self.at = [0] * len(self.windows)  # keys of all steps that are complete
        self.pushed: dict[tuple[int, int, tuple[int, int]], set[int]] = {}

    def push(self, step: int, chain: int, pieces: tuple[tuple[int, int], ...], rank: int) -> None:
        for piece in pieces:
            assert rank in self.keys[chain, piece]
            self.pushed.setdefault((step, chain, piece), set()).add(rank)
        for number, window in enumerate(self.windows):
            while self._complete(1 + self.at[number] // len(window), *window[self.at[number] % len(window)]):
                self.at[number] += 1

    def _complete(self, step: int, chain: int, piece: tuple[int, int]) -> bool:
        return self.pushed.get((step, chain, piece), set()) == set(self.keys[chain, piece])

    def answered(self, step: int, chain: int, pieces: tuple[tuple[int, int], ...]) -> bool:
        """Whether all of these pieces have results."""
        for number, window in enumerate(self.windows):
            for place, (other, piece) in enumerate(window):
                if other == chain and piece in pieces and self.at[number] <= (step - 1) * len(window) + place:
                    return False
        return True


class _Job:
    """Ranks with a Runner each, and servers. A collective is over for everybody once every member has come to it; computation is over whenever."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = Ranks(self.random.choice([(2, 2), (1, 2, 3), (2,), (1, 1), (3, 1), (1, 1, 1), (2, 2, 2)]))
        kinds = self.random.choice([(OPTIONS,), (OPTIONS, OVER_SERVERS), (OVER_SERVERS,)])
        options = [self.random.choice(self.random.choice(kinds)) for _ in range(self.random.randint(1, 5))]
        self.options = options
        order = pipelined(options) if self.random.random() < 0.5 else _any_order(options, self.random)
        self.numel = numel = self.random.choice([1, 5, 60])
        programs = [compile_option(option, numel, self.ranks, chain) for chain, option in enumerate(options)]
        self.layout = _layout(options, order, numel, self.ranks)
        assert self.layout.order == order
        self.servers = _Servers(self.layout)
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
        if isinstance(start.step, Serve):
            self.servers.push(self.steps[rank][start.chain], start.chain, start.step.pieces, rank)
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
            served = isinstance(start.step, Serve)
            if served and not self.servers.answered(self.steps[rank][start.chain], start.chain, start.step.pieces):
                continue
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
        self.through += len(through)
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
        programs = [compile_option(option, job.numel, job.ranks, chain) for chain, option in enumerate(job.options)]
        job.runners[0] = Runner([chain[0] for chain in programs], order)
        try:
            job.run(steps=1)
        except AssertionError:
            stuck += 1
    assert stuck > 5


def test_servers_that_let_keys_in_by_another_order_than_transfers_have_are_caught_by_the_simulation() -> None:
    """So keys' positions have to follow the one order, which they do above."""
    stuck = seen = 0
    for seed in range(300):
        job = _Job(seed)
        if max(map(len, job.servers.windows), default=0) < 3:
            continue
        seen += 1
        for window in job.servers.windows:
            window.reverse()
        try:
            job.run(steps=1)
        except AssertionError:
            stuck += 1
    assert stuck > seen / 4 > 10


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


def test_a_bucket_in_turn_runs_part_after_part_and_agrees_once_for_all_of_them() -> None:
    programs = [compile_option(("flat.reduce_scatter", "flat.all_gather"), numel, Ranks((2,)))[0] for numel in (10, 7)]
    runner = InTurn(programs, 4)
    for _ in range(2):
        assert not runner.begin(5), "which waits for the first part"
        starts, seen, through = runner.begin(4), [], []
        while starts:
            (start,) = starts
            seen.append((start.chain, start.step.action))
            starts, through = runner.over(start.chain)
        assert seen == [(4, 0), (4, 1), (5, 0), (5, 1), (5, 2)] and through == list(runner.agreeing(5)) == [4, 5]
    with pytest.raises(LocalProtocolError, match="part 4 runs no step"):
        runner.over(4)
