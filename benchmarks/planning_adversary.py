"""An adversary of the planner: it takes psgc's plan of a random job and tries to shorten it. Run by ``benchmarks/planning.py --adversary``.

It anneals. A state is any fusion of the tensors (buckets need not be neighbours in readiness), any number of parts, any allowed option and any
order of buckets; a move changes one of these at random: another option, more or fewer parts, two buckets merged, a bucket split, a tensor moved,
another turn. Rounds start in turn from psgc's plan, from the best state so far, and from a random fusion with random options; now and then a state is
improved by coordinate descent over all options. The judge is psgc's own simulation of a step (``simulate``), which every improvement that is
reported has passed; the search's moves and budgets are not used.

Jobs are those of ``planning_rivals.random_job`` with 2 to 64 nodes. Owns the adversary; a table is the caller's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from planning_rivals import SHORTER, kept, random_job

from psgc.plan.local_search.choosing import Chosen, Search
from psgc.plan.local_search.space import Space
from psgc.plan.methods.anytime import search_for
from psgc.plan.methods.search import planned, search
from psgc.plan.model.bucketing import MAX_PARTS, bucketing
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, simulate

NODES: Final = (2, 4, 8, 16, 32, 64)
FIRST_SEED: Final = 5_000_000  # nobody has tuned anything on the jobs from here on
STEPS: Final = 2_000  # moves of one round of annealing
HOT, COLD = 1e-2, 1e-5  # temperatures at a round's beginning and end, as shares of the step
DESCENT: Final = 0.002  # probability of a coordinate descent in place of a move
DESCENT_CHAINS: Final = 5_000


@dataclass(slots=True)
class Bucket:
    """tensors: ascending; option: its number in the space; turn: buckets of lower turns go first."""

    tensors: list[int]
    parts: int
    option: int
    turn: float

    def copy(self) -> Bucket:
        return Bucket(list(self.tensors), self.parts, self.option, self.turn)


class Adversary:
    """One job's. best: the shortest step that it has found, in us, and its plan."""

    def __init__(self, problem: Problem, plan: tuple[PlannedBucket, ...], seed: int) -> None:
        self.problem, self.space = problem, Space(problem)
        self.judge = Search(problem, self.space)
        self.rng = np.random.default_rng([seed, 77])
        place = {tensor.name: number for number, tensor in enumerate(problem.profile.tensors)}
        number = self.space.graph.number
        self.start = [
            Bucket(sorted(place[name] for name in bucket.tensors), bucket.parts, number[bucket.option], float(-bucket.priority))
            for bucket in plan
        ]
        self.fits = [np.flatnonzero(row) for row in self.space.fits(np.arange(len(self.space.graph.options)))]
        self.codec = problem.tensors.codec
        self.step_us = self._step(self.start)
        self.best_us, self.best = self.step_us, self.start
        self.simulated = 0

    def run(self, seconds: float) -> float:
        """Search for so many seconds of processor time. Returns the shortest step found, which ``simulate`` confirms."""
        until, rounds = time.process_time() + seconds, 0
        while time.process_time() < until:
            state = (self.start, self.best, self._random())[rounds % 3 if rounds else 0]
            self._anneal([bucket.copy() for bucket in state], until)
            rounds += 1
        confirmed = simulate(self.problem, planned(self.problem, self.space, self._chosen(self.best))).step_us
        if abs(confirmed - self.best_us) > 1e-9 * confirmed:
            sys.exit(f"planning: the adversary's step of {self.best_us} us is {confirmed} by the simulation")
        return confirmed

    def _chosen(self, state: list[Bucket]) -> Chosen:
        state = sorted(state, key=lambda bucket: bucket.tensors[-1])
        of = np.empty(len(self.codec), np.int64)
        for number, bucket in enumerate(state):
            of[bucket.tensors] = number
        turn = np.empty(len(state), np.int64)
        turn[np.argsort([bucket.turn for bucket in state], kind="stable")] = np.arange(len(state))
        buckets = self.judge.cut(bucketing(self.problem.tensors, of, [bucket.parts for bucket in state]))
        return Chosen(np.inf, np.inf, buckets, np.array([bucket.option for bucket in state], np.int64), turn)

    def _step(self, state: list[Bucket]) -> float:
        found, _ = self.judge.fully(self._chosen(state), np.empty(0, np.int64), 1, 0)
        self.judge.seen.clear()
        self.judge.best = None
        return found.step_us

    def _descended(self, state: list[Bucket]) -> list[Bucket]:
        state = sorted(state, key=lambda bucket: bucket.tensors[-1])
        order = self.rng.permutation(len(state))
        found, _ = self.judge.fully(self._chosen(state), order, int(self.rng.integers(4, 64)), DESCENT_CHAINS)
        self.judge.seen.clear()
        self.judge.best = None
        for bucket, option in zip(state, found.options.tolist(), strict=True):
            bucket.option = option
        return state

    def _anneal(self, state: list[Bucket], until: float) -> None:
        step = self._step(state)
        for number in range(STEPS):
            if time.process_time() > until:
                return
            temperature = step * HOT * (COLD / HOT) ** (number / STEPS)
            if self.rng.random() < DESCENT:
                moved = self._descended([bucket.copy() for bucket in state])
            else:
                moved = self._moved(state)
            after = self._step(moved)
            self.simulated += 1
            if after <= step or self.rng.random() < np.exp((step - after) / temperature):
                state, step = moved, after
                if step < self.best_us:
                    self.best_us, self.best = step, [bucket.copy() for bucket in state]

    def _random(self) -> list[Bucket]:
        """A random fusion of neighbours, with one random option of the start's or of all."""
        tensors, state = self.problem.tensors, []
        of_start = [bucket.option for bucket in self.start]
        option = int(self.rng.choice(of_start)) if self.rng.random() < 0.7 else self._any_option(0)
        size, total = self.problem.profile.numel / 2 ** self.rng.uniform(0, 6), np.inf
        for tensor, numel in enumerate(tensors.numel.tolist()):
            if total + numel > size or self.codec[tensor] != self.codec[state[-1].tensors[0]]:
                state.append(Bucket([], int(2 ** self.rng.uniform(0, 3)), option, float(tensor)))
                total = 0.0
            state[-1].tensors.append(tensor)
            total += numel
        for bucket in state:
            if not np.isin(bucket.option, self.fits[self.codec[bucket.tensors[0]]]):
                bucket.option = self._any_option(int(self.codec[bucket.tensors[0]]))
        return self._descended(state)

    def _any_option(self, codec: int) -> int:
        return int(self.rng.choice(self.fits[codec]))

    def _moved(self, state: list[Bucket]) -> list[Bucket]:
        """The state after one random move, or two. Buckets that stay are shared with the given one, which is not changed."""
        state = list(state)
        for _ in range(1 + int(self.rng.random() < 0.3)):
            (self._other_option, self._other_parts, self._merge, self._split, self._move_tensor, self._other_turn)[
                int(self.rng.choice(6, p=(0.3, 0.15, 0.15, 0.15, 0.15, 0.1)))
            ](state)
        return state

    def _own(self, state: list[Bucket], place: int) -> Bucket:
        """A bucket of the state, which may be changed."""
        state[place] = state[place].copy()
        return state[place]

    def _pick(self, state: list[Bucket]) -> int:
        return int(self.rng.integers(len(state)))

    def _other_option(self, state: list[Bucket]) -> None:
        bucket = self._own(state, self._pick(state))
        codec = self.codec[bucket.tensors[0]]
        others = [other.option for other in state if self.codec[other.tensors[0]] == codec]
        bucket.option = int(self.rng.choice(others)) if self.rng.random() < 0.5 else self._any_option(int(codec))

    def _other_parts(self, state: list[Bucket]) -> None:
        bucket = self._own(state, self._pick(state))
        factor = (0.5, 2.0, 1.0)[int(self.rng.integers(3))]
        change = 0 if factor != 1.0 else int(self.rng.choice((-1, 1)))
        bucket.parts = int(np.clip(round(bucket.parts * factor) + change, 1, MAX_PARTS))

    def _merge(self, state: list[Bucket]) -> None:
        one, other = self._pick(state), self._pick(state)
        if self.rng.random() < 0.5:
            other = min(one + 1, len(state) - 1)
        if one == other or self.codec[state[one].tensors[0]] != self.codec[state[other].tensors[0]]:
            return
        bucket = self._own(state, one)
        bucket.tensors = sorted(bucket.tensors + state[other].tensors)
        bucket.parts = min(MAX_PARTS, int(self.rng.choice((bucket.parts, bucket.parts + state[other].parts))))
        del state[other]

    def _split(self, state: list[Bucket]) -> None:
        place = self._pick(state)
        if len(state[place].tensors) < 2:
            return
        bucket = self._own(state, place)
        if self.rng.random() < 0.7:
            cut = int(self.rng.integers(1, len(bucket.tensors)))
            leaves = bucket.tensors[cut:]
        else:
            leaves = [tensor for tensor in bucket.tensors if self.rng.random() < 0.5]
        if not leaves or len(leaves) == len(bucket.tensors):
            return
        gone = set(leaves)
        bucket.tensors = [tensor for tensor in bucket.tensors if tensor not in gone]
        parts = max(1, bucket.parts // 2) if self.rng.random() < 0.5 else bucket.parts
        bucket.parts = parts
        state.append(Bucket(leaves, parts, bucket.option, bucket.turn + self.rng.uniform(-1, 1)))

    def _move_tensor(self, state: list[Bucket]) -> None:
        one, other = self._pick(state), self._pick(state)
        if one == other or len(state[one].tensors) < 2 or self.codec[state[one].tensors[0]] != self.codec[state[other].tensors[0]]:
            return
        bucket, target = self._own(state, one), self._own(state, other)
        tensor = bucket.tensors.pop(int(self.rng.choice((0, len(bucket.tensors) - 1, self.rng.integers(len(bucket.tensors))))))
        target.tensors = sorted([*target.tensors, tensor])

    def _other_turn(self, state: list[Bucket]) -> None:
        bucket = self._own(state, self._pick(state))
        bucket.turn = state[self._pick(state)].turn + float(self.rng.choice((-0.5, 0.5)))


def attacked(seed: int, fewest: int, most: int, attack_s: float, seconds: float | None) -> dict[str, Any]:
    """One job: our step, what the search took, and the adversary's step after ``attack_s`` seconds of processor time. seconds: of the search, in place of the
    default."""
    problem = random_job(seed, fewest, most, NODES)
    ours = search(problem) if seconds is None else search_for(problem, seconds)
    adversary = Adversary(problem, ours.buckets, seed)
    if abs(adversary.step_us - ours.step_us) > 1e-9 * ours.step_us:
        sys.exit(f"planning: seed {seed}: the plan's step is {ours.step_us} us, and {adversary.step_us} as the adversary reads it")
    found = adversary.run(attack_s)
    return {
        "seed": seed, "tensors": [fewest, most], "count": len(problem.profile.tensors), "gpus": problem.cluster.gpus, "seconds": seconds,
        "attack_s": attack_s, "step_us": ours.step_us, "select_us": ours.select_us, "adversary_us": found, "simulated": adversary.simulated,
    }  # fmt: skip


def run(
    count: int, fewest: int, most: int, out: Path | None, attack_s: float, seconds: float | None = None, first: int = FIRST_SEED
) -> list[dict[str, Any]]:
    """Attack the plans of ``count`` seeds from ``first`` on. out: results, a line each; those that are in it already are not computed again."""
    wanted = {"tensors": [fewest, most], "seconds": seconds, "attack_s": attack_s}
    known = {row["seed"]: row for row in kept(out) if all(row[key] == value for key, value in wanted.items())}
    search(random_job(0, 2, 4, NODES))  # compiles
    for seed in range(first, first + count):
        if seed not in known:
            known[seed] = attacked(seed, fewest, most, attack_s, seconds)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(known[seed]) + "\n")
    return [known[seed] for seed in range(first, first + count)]


def shorter(row: Mapping[str, Any]) -> float:
    """By which share of our step the adversary's is shorter."""
    return float(1 - row["adversary_us"] / row["step_us"])


def summary(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What the attack shows, in lines."""
    every = sorted(rows, key=shorter, reverse=True)
    times = sorted(row["select_us"] / 1e3 for row in every)
    counts = [sum(shorter(row) > share for row in every) for share in (SHORTER, 0.01, 0.02, 0.05)]
    yield (
        f"{len(every)} jobs: the adversary's plan is shorter by more than {SHORTER:.1%} on {counts[0]}, 1% on {counts[1]}, 2% on {counts[2]}, 5% on "
        f"{counts[3]}, by {shorter(every[0]):.2%} at most; the search took {statistics.median(times):.1f} ms in the median, {times[-1]:.1f} at most"
    )
    for row in every[:12]:
        yield (
            f"  seed {row['seed']}, {row['count']} tensors, {row['gpus']} GPUs: {row['step_us']:,.1f} -> {row['adversary_us']:,.1f} us, "
            f"{shorter(row):.2%} shorter; {row['simulated']:,} states"
        )
