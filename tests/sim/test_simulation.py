"""Whole jobs under bad luck: right sums, no loss, no deadlock. And: the simulation itself sees a broken rule when there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from broken_rules import Rules, method
from sim_network import Channel, Weather
from sim_oracle import Chances
from sim_worker import SimWorker, Ticket
from simulation import Scenario, World, quiet, simulate

from psgc.scheduler.rendezvous import Barriers, Name
from psgc.server.state import Commit
from psgc.server.step import NO_SLOT, Fold, KeyState
from psgc.server.window import Window
from psgc.wire.frames import Flag, Header, Kind
from psgc.worker import sending
from psgc.worker.client import Client, Greet, Transmit
from psgc.worker.parts import Phase
from psgc.worker.requests import Requests
from psgc.worker.sending import Sending
from tests.cases import for_each

SAMPLE = 500  # three times what it takes to contain everything that is expected; the long test has very many
EXAMINED = 150  # of which it is counted what happened in them
CHUNK = 50
LONG = 100_000
LONG_CHUNK = 1000


@pytest.mark.parametrize("first", range(EXAMINED, SAMPLE, CHUNK))
def test_every_rank_gets_exactly_the_published_sum_of_every_step(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(Scenario.drawn(seed))


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_every_rank_gets_exactly_the_published_sum_of_every_step_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        simulate(Scenario.drawn(seed))


def test_a_seed_is_its_own_reproduction() -> None:
    for seed in range(20):
        once, again = (simulate(Scenario.drawn(seed)) for _ in range(2))
        assert once.clock.now == again.clock.now
        assert (once.network.lost, once.network.repeated, once.network.cuts) == (
            again.network.lost,
            again.network.repeated,
            again.network.cuts,
        )


def test_every_rank_gets_the_published_sum_in_a_sample_that_contains_what_it_is_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(EXAMINED):
        world = simulate(Scenario.drawn(seed))
        seen["a connection was cut"] += world.network.cuts
        seen["a message was lost"] += world.network.lost
        seen["a message was repeated"] += world.network.repeated
        seen["one key at a time"] += world.scenario.window_bytes == 1
        seen["a step took two rounds"] += world.scenario.codec == "shared" and world.scenario.steps > 0
        seen["one credit"] += world.scenario.credit_parts == 1
        for worker in world.workers:
            assert worker.client is not None
            seen["a push was sent again"] += worker.client.counts.resent
            seen["a result was asked for"] += worker.client.counts.asked
            seen["a residual was saved"] += worker.residuals
        seen["links were slow"] += world.scenario.weather.rate < 1e5 and world.scenario.local < 1
        for server in world.servers:
            seen["a residual was restored"] += (
                sum(bool(entry.state.restored) for entry in server.state.keys.values()) if server.state else 0
            )
        for word in world.oracle.words.values():
            seen["some ranks skipped"] += 0 < len(word.skipping) < world.scenario.workers
            seen["all ranks skipped"] += len(word.skipping) == world.scenario.workers
            seen["a part was poisoned"] += any(word.poisoned)
            seen["a sum was not finite"] += bool(word.overflow)
            seen["a step was not applied"] += word.previous_skipped
            seen["the residual changed its unit"] += word.rescale != 1.0
        for server in world.servers:
            seen["a result was added back"] += sum(len(value) > 4 and value[5] is not None for value in server.slots.values())
    missing = [what for what in EXPECTED if not seen[what]]
    assert not missing, seen


EXPECTED = [
    "a connection was cut", "a message was lost", "a message was repeated", "one key at a time", "one credit",
    "a push was sent again", "a step took two rounds", "links were slow",
    "a result was asked for", "some ranks skipped", "all ranks skipped", "a part was poisoned", "a sum was not finite",
    "a residual was saved", "a residual was restored", "a step was not applied", "the residual changed its unit", "a result was added back",
]  # fmt: skip


# broken rules: the simulation must see each

BAD = Scenario(
    workers=3, parts=(2, 1), steps=4, codec="onebit/none", window_bytes=1 << 20, credit_parts=1, barriers=0.125, work_s=0.0002,
    weather=Weather(delay_s=0.01, slow=0.1, repeats=0.0), chances=Chances(0.0, 0.05, 0.4, 0.0, 0.025),
)  # fmt: skip
ROUGH = replace(
    BAD, chances=Chances(), cuts=8, cut_every_s=0.01, weather=replace(BAD.weather, delay_s=0.002, repeats=0.1, reconnect_s=0.02)
)
ODD = replace(BAD, codec="onebit", chances=Chances(0.2, 0.1, 0.5, 0.5, 0.1), window_bytes=1 << 30)
SAVED = replace(ROUGH, codec="onebit", saves=1.0, restores=True, chances=Chances(0.0, 0.1, 0.5, 0.5, 0.1), window_bytes=1 << 30)
TOLD = replace(ROUGH, publishes=True, steps=1, cuts=12, cut_every_s=0.004)
SLOW = replace(
    BAD, codec="none", parts=(4, 4), chances=Chances(), cuts=0, local=0.0, weather=Weather(slow=0.0, repeats=0.0, rate=1e5), credit_parts=-1,
    credit_bytes=0, window_bytes=1 << 30,
)  # fmt: skip


def _counts_repeats(contribute: Any) -> Any:
    def wrong(self: KeyState, rank: int, header: Any, payload: Any) -> Any:
        return contribute(self, rank, header._replace(step=self.step), payload)

    return wrong


def _forgets_early(contribute: Any) -> Any:
    def wrong(self: KeyState, rank: int, header: Any, payload: Any) -> Any:
        actions = contribute(self, rank, header, payload)
        if self.contributions:
            self.result = None  # somebody has gone on, somebody else may not have heard
        return actions

    return wrong


def _one_slot(complete: Any) -> Any:
    def wrong(self: KeyState, payloads: Any) -> Any:
        return [replace(a, slot=max(self.last_slot, 0)) if isinstance(a, Fold) else a for a in complete(self, payloads)]

    return wrong


def _sends_before_it_remembers(commit: Any) -> Any:
    return lambda self, result: sorted(commit(self, result), key=lambda action: isinstance(action, Commit))


def _order_of_arrival(advance: Any) -> Any:
    def wrong(self: KeyState) -> Any:
        actions = advance(self)
        arrived = tuple(c.payload for c in self.contributions.values() if c.payload is not None)
        return [replace(a, payloads=arrived) if isinstance(a, Fold) else a for a in actions]

    return wrong


def _never_adds_back(carry: Any) -> Any:
    def wrong(self: KeyState) -> None:
        carry(self)
        self.add_back = False

    return wrong


def _tells_what_is_new(residual: Any) -> Any:
    def wrong(self: KeyState, rank: int, header: Any) -> Any:
        return [replace(a, add_back=NO_SLOT) for a in residual(self, rank, header)]

    return wrong


def _forgets_units(commit: Any) -> Any:
    def wrong(self: KeyState, result: Any) -> Any:
        self.rescale = 1.0
        return commit(self, result)

    return wrong


@contextmanager
def _says_nothing_again() -> Iterator[None]:
    """Neither on a new connection nor when a server asks for it."""

    def connected(self: Client, server: int, now: float, *, queues: bool = False) -> Any:
        state = self.servers[server]
        state.up = True
        state.sending.connected(queues)
        return [Greet(server), *self._measure(server, now), *self._pump(server)]

    with patch.object(Client, "connected", connected), patch.object(Client, "_error", lambda *_: []):
        yield


def _forgets(requests: str) -> Callable[[Any], Any]:
    """On a new connection all is said again but these requests."""

    def wrong(say_again: Any) -> Any:
        def forgetful(self: Requests) -> None:
            with patch.object(self, requests, {}):
                say_again(self)

        return forgetful

    return wrong


def _pushes_what_is_quiet(tick: Any) -> Any:
    def wrong(self: SimWorker) -> None:
        client, now = self.client, self.clock.now
        for server in range(len(client.servers) if client is not None else 0):
            assert client is not None
            quiet_ = [part for part in client._unanswered(server) if now - part.said.began > 2.0 and part.phase is Phase.SENT]
            self._apply([client._push(part) for part in quiet_])
        tick(self)

    return wrong


@contextmanager
def _asks_after_residuals_once() -> Iterator[None]:
    connected = Client.connected

    def wrong(self: Client, server: int, *arguments: Any, **more: Any) -> Any:
        said = self.servers[server].transfers.said
        return [a for a in connected(self, server, *arguments, **more) if not (isinstance(a, Transmit) and _is_of(a, said))]

    with patch.object(Client, "connected", wrong):
        yield


def _is_of(action: Transmit, transfers: Any) -> bool:
    return action.header.kind in (Kind.RESIDUAL, Kind.RESTORE) and any(t.key == action.header.key for t in transfers)


@contextmanager
def _pushes_before_it_asks() -> Iterator[None]:
    """What was not acknowledged goes out at once on a new connection."""

    def ask(self: Client, part: Any) -> Any:
        part.asked = True
        return self._push(part) if part.phase is Phase.SENT else Transmit(part.server, self._header(Kind.PULL, part))

    with patch.object(Client, "_ask", ask):
        yield


def _miscounts(complete: Any) -> Any:
    def wrong(self: Window, part: int, step: int) -> Any:
        self._reserved -= self._costs[part]
        return complete(self, part, step)

    return wrong


# Each is seen by the third seed.
RULES: Rules[Scenario] = Rules(simulate, 15, {
    "a repeat is counted as a contribution": (ROUGH, method(KeyState, "contribute", _counts_repeats)),
    "the kept result goes when the first rank goes on": (ROUGH, method(KeyState, "contribute", _forgets_early)),
    "the kept result is overwritten by the next": (ODD, method(KeyState, "_complete", _one_slot)),
    "a result is sent before it is remembered": (BAD, method(KeyState, "_commit", _sends_before_it_remembers)),
    "payloads are summed as they arrive": (BAD, method(KeyState, "_advance", _order_of_arrival)),
    "a step that was not applied is not added back": (ODD, method(KeyState, "_carry_forward", _never_adds_back)),
    "what is not applied is left out of a saved residual": (SAVED, method(KeyState, "residual", _tells_what_is_new)),
    "residuals that were asked for are not asked for again": (SAVED, _asks_after_residuals_once),
    "a change of unit is lost in a step without payload": (ODD, method(KeyState, "_commit", _forgets_units)),
    "what was lost is not sent again": (ROUGH, _says_nothing_again),
    "what is quiet is sent again": (SLOW, method(SimWorker, "_tick", _pushes_what_is_quiet)),
    "what may be lost is sent again without a question": (ROUGH, _pushes_before_it_asks),
    "a result is sent again though it is on its way": (ROUGH, method(KeyState, "_is_queued", lambda _: lambda *_: False)),
    "what was on its way when a connection broke is taken for sent": (ROUGH, method(KeyState, "reconnected", lambda _: lambda *_: None)),
    "more payloads are given to a connection than it needs": (SLOW, lambda: patch.object(sending, "MOST_UNSENT", 3)),
    "payloads that leave a connection's queue make no room there": (SLOW, method(Client, "departed", lambda _: lambda *_: [])),
    "credit is not given back": (replace(BAD, credit_parts=1), method(Sending, "give_back", lambda _: lambda self, part: None)),
    "pushes are sent past the credit": (replace(BAD, credit_parts=1), method(Sending, "_has_credit", lambda _: lambda *_: True)),
    "a window that is full admits more": (
        replace(BAD, window_bytes=1, credit_parts=-1, credit_bytes=0), method(Window, "complete", _miscounts)
    ),
    "a barrier opens for the first": (
        replace(BAD, barriers=1.0), method(Barriers, "arrive", lambda _: lambda self, rank, number, now, layout: list(range(self._size)))
    ),
    "a value that a broken connection lost is not asked for again": (
        TOLD, method(Requests, "say_again", _forgets("_lookups"))
    ),
    "a value that a broken connection lost is not published again": (
        TOLD, method(Requests, "say_again", _forgets("_published"))
    ),
    "workers hear of a layout before the servers": (
        ODD, lambda: patch.object(Name, "ready", property(lambda self: self.layout is not None))
    ),
})  # fmt: skip


@pytest.mark.parametrize("scenario", RULES.scenarios, ids=lambda scenario: scenario.codec)
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Scenario) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)


# interleavings by name


class Scripted(World):
    """A world in which a test says what each trainer does."""

    def __init__(self, scenario: Scenario, act: Callable[[World, SimWorker], Iterator[Any]]) -> None:
        self._act = act
        super().__init__(scenario)

    def script(self, worker: SimWorker) -> Iterator[float | list[Ticket]]:
        yield [worker.declare(self.model())]
        yield from self._act(self, worker)
        worker.leave()


def in_opposite_orders(world: World, worker: SimWorker) -> Iterator[list[Ticket]]:
    model = worker.layouts["model"]
    buckets = [bucket.index for bucket in model.buckets]
    for _ in range(world.scenario.steps):
        yield [worker.submit(model, bucket) for bucket in (buckets if worker.node % 2 else reversed(buckets))]


@for_each(seed=range(20), window_bytes=[1, 1 << 30])
def test_opposite_ready_orders_on_two_servers_with_one_credit_do_not_deadlock(seed: int, window_bytes: int) -> None:
    scenario = quiet(seed=seed, servers=2, parts=(1, 1, 1, 1), steps=3, credit_parts=1, credit_bytes=1, window_bytes=window_bytes)
    simulate(scenario, lambda s: Scripted(s, in_opposite_orders))


def two_before_one_wait(world: World, worker: SimWorker) -> Iterator[list[Ticket]]:
    model = worker.layouts["model"]
    yield [worker.submit(model, bucket.index) for _ in range(2) for bucket in model.buckets]


@for_each(seed=range(20))
def test_two_backwards_before_one_step_are_two_steps_in_order(seed: int) -> None:
    world = simulate(quiet(seed=seed, workers=3, steps=2, codec="onebit"), lambda s: Scripted(s, two_before_one_wait))
    assert all(kept.step == 2 for server in world.servers for kept in server.committed.values())


@for_each(seed=range(10))
def test_names_declared_in_different_orders_by_different_ranks_meet(seed: int) -> None:
    def named_in_turn(world: World, worker: SimWorker) -> Iterator[list[Ticket]]:
        names = world.named()
        turn = worker.node % len(names)
        yield [worker.submit_named(name) for name in names[turn:] + names[:turn]]

    simulate(
        quiet(seed=seed, workers=3, parts=(), steps=1, names=3, broadcasts=1, credit_parts=1, cuts=seed % 3),
        lambda s: Scripted(s, named_in_turn),
    )


def test_seventeen_ranks_are_summed_in_three_blocks() -> None:
    world = simulate(quiet(workers=17, parts=(1,), steps=2))
    (value,) = [v for (_, slot), v in world.servers[0].slots.items() if world.servers[0].committed[v[1]].slot == slot]
    assert [[payload[3] for payload in block] for block in value[3]] == [list(range(8)), list(range(8, 16)), [16]]


@for_each(workers=[2, 17])
def test_a_sum_of_which_all_skipped_leaves_gradients_as_they_were(workers: int) -> None:
    world = simulate(quiet(workers=workers, chances=Chances(skip=1.0), steps=3))
    assert {kept.flags for kept in world.servers[0].committed.values()} == {Flag.SKIPPED}
    assert world.servers[0].slots == {}, "nothing was folded"


def test_many_names_over_a_link_on_which_answers_take_long_are_each_said_once() -> None:
    """Whoever says something again because nothing has come for a while makes a slow link slower."""
    names, workers, servers = 150, 2, 2
    scenario = quiet(workers=workers, servers=servers, parts=(1,), steps=1, names=names)
    slow = replace(scenario, weather=replace(scenario.weather, delay_s=20.0))
    said: Counter[Kind] = Counter()
    put = Channel.put

    def counted(self: Channel, header: Header, payload: Any) -> None:
        said[Kind(header.kind)] += 1
        put(self, header, payload)

    with patch.object(Channel, "put", counted), patch("simulation.STUCK_S", 1000.0):
        world = simulate(slow)
    assert world.clock.now > 100, "silence lasts for longer than PSGC_SILENCE_S again and again"
    layouts = names + 1
    questions = layouts  # DECLARE to rank 0
    assert said[Kind.DECLARE] == workers * layouts + questions
    assert said[Kind.DECLARATION] == layouts
    assert said[Kind.KEYS] == said[Kind.KEYS_READY] == servers * layouts
    assert said[Kind.LAYOUT] == workers * layouts
