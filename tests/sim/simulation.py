"""A whole job in one process and in virtual time: real scheduler, server and client state machines over connections that misbehave.

Everything follows from the seed, so a seed that fails is its own reproduction: ``simulate(Scenario.drawn(seed))``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from sim_members import SimScheduler, SimServer, WrongError, check
from sim_network import Clock, Network, Weather
from sim_oracle import Chances, Oracle
from sim_worker import SimWorker, Ticket

from psgc.codecs import parse_scheme
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, part_numel
from psgc.processes.absence import Absence
from psgc.wire.frames import Flag
from psgc.wire.messages import ErrorCode, Register
from psgc.worker import coordinator
from psgc.worker.residuals.transfers import Transfer

STUCK_S = 60.0  # no part has come to its end for so long: nothing ever will, but over slow links
SLOWEST_RATE = 2e4  # bytes a second: a payload takes half a second, but for what parts are at the least, and many wait for one another
PATIENCE_S = 600.0
CRASH_AT_BEGIN = 0.2  # chance that a process may end before it lets workers in
CRASH_IN_EFFECTS = 0.02  # chance that a server's process ends between two things that one message has it do
PAIRS = ("none", "onebit", "onebit/none", "none/onebit")  # codecs that a bucket behind sums within nodes may have
NODES = ((2, 2), (1, 2), (3, 1), (1, 2, 3), (2, 1, 2), (3,), (2,) * 9)
BEHIND_NODES = (
    ("intra.reduce_scatter", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.all_gather"),
    ("intra.reduce", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.broadcast"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and its luck. parts: of each tensor of the model; each tensor is a bucket. node_sizes: where nodes sum first, and some of their ranks push the
    sums, the ranks of each node; else nothing, and each rank is a node."""

    seed: int = 0
    workers: int = 2
    node_sizes: tuple[int, ...] = ()
    servers: int = 1
    parts: tuple[int, ...] = (1, 2)
    steps: int = 3
    names: int = 0  # ad-hoc names besides the model
    broadcasts: int = 0
    codec: str = "none"
    window_bytes: int = 1 << 30
    credit_parts: int = -1
    credit_bytes: int = 0
    local: float = 0.5  # share of links over shared memory
    hurry: float = 0.0  # share of steps whose results are not waited for before the next is submitted
    barriers: float = 0.0  # share of steps with a barrier after them
    saves: float = 0.0  # share of steps after which a rank asks the servers for residuals
    restores: bool = False  # servers' residuals are set before the first step
    work_s: float = 0.001
    cuts: int = 0
    cut_every_s: float = 0.02
    crashes: int = 0  # of servers' processes, once steps are under way
    crash_every_s: float = 0.05
    restart_s: float = 0.2  # until the next process of a server, or of the scheduler, begins, on average
    scheduler_crashes: int = 0  # of the scheduler's process, from the job's first moment
    cuts_early: bool = False  # from the start, and not only when steps are under way
    publishes: bool = False  # ranks tell each other where they are before the first step
    weather: Weather = field(default_factory=Weather)
    chances: Chances = field(default_factory=Chances)
    backup: int = 0  # of the model: how many ranks a step need not wait for
    expected_errors: frozenset[ErrorCode] = frozenset({ErrorCode.PUSH_MISSING})

    @classmethod
    def drawn(cls, seed: int) -> Scenario:
        """The scenario that a seed stands for. Slow links only for two codecs: others would be cut into very many parts."""
        rng = random.Random(seed)
        codec = rng.choice(("none", "none", "onebit", "onebit", "onebit/none", "none/onebit", "shared", "onebit/relay"))
        rates = (math.inf, math.inf, 2e7, 2e6, 2e5, SLOWEST_RATE) if codec in ("none", "onebit") else (math.inf,)

        def sometimes(most: float) -> float:
            return rng.choice((0.0, 0.0, most / 4, most))

        drawn = cls(
            seed=seed,
            workers=rng.choice((1, 2, 2, 3, 3, 4, 5)) if rng.random() < 0.98 else rng.choice((8, 9, 17)),
            servers=rng.choice((1, 2)),
            parts=tuple(rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, 3))),
            steps=rng.randint(1, 5),
            names=rng.choice((0, 0, 1, 2)),
            broadcasts=rng.choice((0, 0, 0, 1)),
            codec=codec,
            window_bytes=rng.choice((1 << 30, 1, 1, 1 << 20)),
            credit_parts=rng.choice((-1, 0, 1, 1, 2)),
            credit_bytes=rng.choice((0, 0, 1, 250_000)),
            local=rng.choice((0.0, 0.5, 1.0)),
            hurry=sometimes(0.6),
            barriers=sometimes(0.5),
            work_s=rng.choice((0.0002, 0.002, 0.02)),
            cuts=rng.choice((0, 0, 1, 4, 12)),
            cut_every_s=rng.choice((0.005, 0.02, 0.05, 0.2)),
            weather=Weather(
                rng.choice((0.0002, 0.001, 0.01)), rng.choice((0.0, 0.02, 0.1)), sometimes(0.15), rng.choice((0.02, 0.3, 1.0)),
                rng.choice(rates),
            ),
            chances=Chances(sometimes(0.4), sometimes(0.2), sometimes(0.4), sometimes(0.4), sometimes(0.1)),
            saves=sometimes(0.6),
            restores=rng.random() < 0.4,
            cuts_early=rng.random() < 0.2,
            publishes=rng.random() < 0.3,
        )  # fmt: skip
        sizes = rng.choice(NODES) if codec in PAIRS and rng.random() < 0.4 else ()
        return replace(drawn, node_sizes=sizes, workers=sum(sizes) or drawn.workers)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The ranks of each node."""
        return self.node_sizes or (1,) * self.workers


@cache
def tensor_numel(codec: str, parts: int) -> int:
    """Elements of a float32 tensor that is cut into so many parts of the least size."""
    return parts * part_numel(parse_scheme(codec), "float32", 1)


class World:
    """One simulated job."""

    on_worker_loss = "stop"
    of_scheduler: Mapping[str, Any] = MappingProxyType({})  # further settings of it

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.clock = Clock()
        self.job, self.token = 5, "secret"
        self.network = Network(self.clock, self.rng, scenario.weather)
        self.oracle = Oracle(self.rng, scenario.workers, scenario.chances)
        self.followers: dict[Ticket, list[Ticket]] = {}
        self.places = [(node, local) for node, size in enumerate(scenario.nodes) for local in range(size)]  # by rank
        self.sizes: dict[int, tuple[int, int]] = {}  # key -> bytes of a push's payload and of a result's
        self._last_progress = 0.0
        self._nonces = 0
        self._arrived: dict[int, int] = {}
        self._cuts_left, self._crashes_left = scenario.cuts, scenario.crashes
        self.crashes = 0
        self._scheduler_crashes_left = scenario.scheduler_crashes
        self._stuck_s = STUCK_S + 1e7 / scenario.weather.rate
        self._barrier_after = [self.rng.random() < scenario.barriers for _ in range(scenario.steps)]
        self.scheduler = SimScheduler(self)
        self.servers = [SimServer(self, index) for index in range(scenario.servers)]
        self.workers = [SimWorker(self, node) for node in range(scenario.workers)]
        self._cutting = False
        if scenario.scheduler_crashes:
            self.clock.after(self._until_crash(), self._crash_scheduler)
        if scenario.cuts_early:
            self.begin_cuts()

    def run(self) -> World:
        """To the job's end. Raises WrongError if it is not the right one."""
        while not self._ended():
            self.clock.step()
            if self.clock.now - self._last_progress > self._stuck_s:
                raise WrongError(f"stuck: {self._stuck()}")
        self._check_end()
        return self

    def alive(self, register: Register) -> bool | None:
        """What the scheduler knows of a member's process."""
        return None

    def may_say(self, body: bytes) -> bool:
        """Whether the scheduler may refuse a worker with this."""
        return False

    def progress(self) -> None:
        self._last_progress = self.clock.now

    def nonce(self) -> bytes:
        """Of a handshake; each once."""
        self._nonces += 1
        return b"%032d" % self._nonces

    def work_time(self) -> float:
        """How long a pool's job takes."""
        return self.scenario.work_s * self.rng.expovariate(1.0)

    def push_codecs(self, layout: Layout) -> dict[int, int]:
        """By key; and how long payloads are is noted."""
        rounds = {part.key: layout.scheme(bucket).rounds(part.numel)[part.round] for bucket, part in layout.parts()}
        self.sizes |= {key: (r.pair.push.payload_bound(r.numel), r.pair.pull.payload_bound(r.numel)) for key, r in rounds.items()}
        return {key: round_.pair.push.codec_id for key, round_ in rounds.items()}

    # what each rank's trainer does

    def script(self, worker: SimWorker) -> Iterator[float | list[Ticket]]:
        scenario, rng = self.scenario, self.rng
        yield [worker.declare(self.model())]
        model, named = worker.layouts["model"], self.named()
        open_: list[Ticket] = []
        if scenario.restores:
            yield [worker.transfer(self.restored(worker, model))]
            yield from self._barrier(worker, 1)
        if scenario.publishes:
            yield [worker.publish()]
        for step in range(scenario.steps):
            jobs: list[Any] = [*(bucket.index for bucket in model.buckets), *named]
            rng.shuffle(jobs)
            for job in jobs:
                yield self.work_time()
                open_.append(worker.submit(model, job) if isinstance(job, int) else worker.submit_named(job))
            if rng.random() >= scenario.hurry:
                yield open_
                open_ = []
                if scenario.saves and rng.random() < scenario.saves:
                    yield [worker.transfer(self.asked(worker, model))]
            if self._barrier_after[step]:
                yield from self._barrier(worker, scenario.restores + sum(self._barrier_after[: step + 1]))
        yield open_
        if scenario.node_sizes:  # a step of such buckets ends with a control word of all ranks, also for one that pushes nothing
            yield from self._barrier(worker, scenario.restores + sum(self._barrier_after) + 1)
        worker.leave()

    def share(self, worker: SimWorker, model: Layout) -> Iterator[tuple[int, int]]:
        """Keys of the buckets that a rank answers for, whose servers keep a residual, and first elements of their messages: a few."""
        for bucket in model.buckets:
            for part in bucket.parts:
                ranks = part.contributors or range(self.scenario.workers)
                if ranks[bucket.index % len(ranks)] == worker.node and self.oracle.keeps_residual(part.key):
                    firsts = {0, self.oracle.numel(part.key) - 1}
                    yield from ((part.key, first) for first in sorted(firsts))

    def asked(self, worker: SimWorker, model: Layout) -> list[Transfer]:
        """What a rank says between two steps to save the servers' residuals; of the next step's word it knows what was dropped."""
        assert worker.client is not None
        transfers = []
        for key, first in self.share(worker, model):
            step = worker.client.parts[key].step
            dropped = self.oracle.word(model, key >> 24 & 0xFFFFFF, step + 1).previous_skipped
            transfers.append(Transfer(key, first, step, Flag.PREVIOUS_SKIPPED if dropped else Flag.NONE))
        return transfers

    def restored(self, worker: SimWorker, model: Layout) -> list[Transfer]:
        """What it says before the first step to set them."""
        share = list(self.share(worker, model))
        rescale = self.scenario.seed % 3 or 1.0
        for key in {key for key, _ in share}:
            self.oracle.restore(key, {first for other, first in share if other == key}, rescale)
        return [Transfer(key, first, 0, payload=b"4444", rescale=rescale) for key, first in share]

    def model(self) -> Declaration:
        codec = self.scenario.codec
        tensors = tuple(TensorSpec(f"t{i}", (tensor_numel(codec, parts),), "float32") for i, parts in enumerate(self.scenario.parts))
        everything = tuple(range(len(tensors)))
        buckets = tuple(
            BucketSpec((i,), codec, -i, parts, option=BEHIND_NODES[i % 2]) for i, parts in enumerate(self.scenario.parts)
        ) if self.scenario.node_sizes else ()  # fmt: skip
        return Declaration("model", "plan", tensors, codec, True, 0, everything, everything, 1, 1, 0, buckets, backup=self.scenario.backup)

    def named(self) -> list[Declaration]:
        """Ad-hoc sums and broadcasts, each of one tensor."""
        scenario = self.scenario
        spec = (TensorSpec("x", (1000,), "float32"),)
        sums = [Declaration(f"sum {i}", "adhoc", spec, scenario.codec, False) for i in range(scenario.names)]
        root = scenario.workers - 1
        return sums + [Declaration(f"broadcast {i}", "broadcast", spec, "none", False, root) for i in range(scenario.broadcasts)]

    def _barrier(self, worker: SimWorker, number: int) -> Iterator[list[Ticket]]:
        self._arrived[number] = self._arrived.get(number, 0) + 1
        yield [worker.barrier(number)]
        check(self._arrived[number] == self.scenario.workers, lambda: f"rank {worker.node} passed barrier {number} before all had come")

    # bad luck

    def begin_cuts(self) -> None:
        if not self._cutting:
            self._cutting = True
            self.clock.after(self._until_cut(), self._cut)
            if self._crashes_left:
                self.clock.after(self._until_crash(), self._crash)

    def _until_crash(self) -> float:
        return self.scenario.crash_every_s * 2 * self.rng.random()

    def crashes_here(self) -> bool:
        """Whether a server's process ends in the middle of what it does now."""
        if not self._cutting or not self._may_crash() or self.rng.random() > CRASH_IN_EFFECTS:
            return False
        self._crashes_left -= 1
        return True

    def scheduler_crashes_here(self) -> bool:
        """Whether the scheduler's process ends in the middle of what it does now."""
        if not self._scheduler_crashes_left or self.scheduler.ended or self.network.desk.away or self.rng.random() > CRASH_IN_EFFECTS:
            return False
        self._scheduler_crashes_left -= 1
        return True

    def _crash_scheduler(self) -> None:
        if self._scheduler_crashes_left and not self.scheduler.ended:
            begun = self.scheduler.state.agreements is not None or self.rng.random() < CRASH_AT_BEGIN
            if begun and not self.network.desk.away:
                self._scheduler_crashes_left -= 1
                self.scheduler.crash()
            self.clock.after(self._until_crash(), self._crash_scheduler)

    def _may_crash(self) -> bool:
        """A server that ends once the workers have left is not started again."""
        return self._crashes_left > 0 and not all(worker.coordinator.left for worker in self.workers)

    def _crash(self) -> None:
        if self._may_crash():
            beginning = self.rng.random() < CRASH_AT_BEGIN
            up = [server for server in self.servers if not server.down and not server.ended and (beginning or not server.host.away)]
            if up:
                self._crashes_left -= 1
                self.rng.choice(up).crash()
            self.clock.after(self._until_crash(), self._crash)

    def _until_cut(self) -> float:
        return self.scenario.cut_every_s * 2 * self.rng.random()

    def _cut(self) -> None:
        if self._cuts_left:
            self._cuts_left -= 1
            self.network.cut_one()
            self.clock.after(self._until_cut(), self._cut)

    # the end

    def _ended(self) -> bool:
        return self.scheduler.ended is not None and all(w.ended for w in self.workers) and all(s.ended for s in self.servers)

    def _check_end(self) -> None:
        scenario = self.scenario
        end = self.scheduler.ended
        check(end is not None and end.status == 0, lambda: f"the scheduler ends with {end}")
        for worker in self.workers:
            own = [
                part
                for layout in worker.layouts.values()
                for _, part in layout.parts()
                if worker.node in (part.contributors or (worker.node,))
            ]
            wanted = len(own) * scenario.steps
            client = worker.client
            assert client is not None
            check(
                not any(s.transfers.said or s.transfers.waiting for s in client.servers),
                lambda w=worker: f"worker {w.node} waits for residuals",
            )
            check(worker.results == wanted, lambda w=worker, n=wanted: f"worker {w.node} has decoded {w.results} results, not {n}")
            credit = [(server.sending.in_flight, server.sending.parts_in_flight) for server in client.servers]
            check(set(credit) == {(0, 0)}, lambda w=worker, c=credit: f"worker {w.node} never got credit back: {c}")
        needed, carried = self.needed_bytes(), self.network.carried
        fine = carried >= needed if self.network.cuts else carried == needed
        check(fine, lambda: f"connections that were cut {self.network.cuts} times carried {carried} bytes of payloads, {needed} are needed")

    def needed_bytes(self) -> int:
        """Of payloads: one of each contribution that has one, and one of each result for each rank. A connection that is cut may have
        carried some in vain; that none carries one twice is checked as it happens."""
        needed = 0
        for layout in self.workers[0].layouts.values():
            for bucket, part in layout.parts():
                for step in range(1, self.scenario.steps + 1):
                    word = self.oracle.word(layout, bucket.index, step)
                    ranks = set(part.contributors or range(self.scenario.workers))
                    push, pull = self.sizes[part.key]
                    needed += push * len(ranks - word.skipping - word.poisoned[self.oracle.number(part.key)])
                    needed += pull * len(ranks) * (self.oracle.outcome(part.key, step).value is not None)
        return needed

    def _stuck(self) -> str:
        states = [server.state for server in self.servers if server.state]
        for state in states:
            state.absence = Absence(math.inf)  # what would be said after some time of running
        awaited = [text for state in states for text in state.tick(self.clock.now + PATIENCE_S)[0]]
        phases = [
            f"worker {w.node}: {[(hex(p.place.key), p.step, p.phase.value) for p in w.client.parts.values()]} credit "
            f"{[(s.in_flight, s.parts_in_flight, s.windows) for s in (server.sending for server in w.client.servers)]}"
            for w in self.workers
            if w.client is not None
        ]
        return "; ".join([*awaited, *phases])


def simulate(scenario: Scenario, make: Callable[[Scenario], World] = World) -> World:
    """Run a scenario to its end, in the world that ``make`` makes. Raises WrongError, naming the scenario, if anything goes otherwise than the oracle says."""
    try:
        clock = SimpleNamespace(monotonic=lambda: world.clock.now if world is not None else 0.0)
        world: World | None = None
        with (
            patch.object(coordinator, "Dealer", lambda context, *_: context),
            patch.object(coordinator, "time", clock),
            patch.object(coordinator.logger, "disabled", True),
        ):
            world = make(scenario)
            return world.run()
    except Exception as error:
        raise WrongError(f"seed {scenario.seed}: {type(error).__name__}: {error}\n{scenario}") from error


def quiet(**fields: Any) -> Scenario:
    """A scenario in which nothing bad happens but what ``fields`` ask for."""
    return replace(Scenario(weather=Weather(slow=0.0, repeats=0.0)), **fields)
