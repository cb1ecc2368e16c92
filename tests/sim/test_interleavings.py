"""Interleavings by name, told step by step: what gets lost when, and what must come of it all the same."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_link import Line
from sim_members import SimServer
from sim_network import Channel, Clock, Network, Weather
from sim_oracle import Word, name_of_residual, name_of_result
from simulation import SLOWEST_RATE, World, quiet, simulate

from psgc.codecs import CodecPair, Stream, parse_codec
from psgc.errors import PayloadError, RemoteProtocolError
from psgc.layout import Declaration, Layout, TensorSpec, build_layout, make_key
from psgc.processes.absence import Absence
from psgc.server.engine import Engine, KeyWork
from psgc.server.state import Retire, Send, ServerState, specs_of
from psgc.server.step import NO_SLOT, Commit, Fold, KeySpec, KeyState, Lend, Reply, Restore, Result
from psgc.server.store import KeyShape, Store
from psgc.server.window import OPEN, Window
from psgc.wire.frames import SERVER_SENDER, Flag, Header, Kind, pack_header, unpack_header
from psgc.wire.messages import RESIDUAL_NUMEL, ErrorCode, Notice, encode_body
from psgc.worker.client import Action, Client, Failed, Greet, Transferred, Transmit
from psgc.worker.parts import PartPlace, PartState, Phase
from psgc.worker.residuals.transfers import Transfer


def breaking(when: Callable[[Header], bool]) -> Callable[[Any], World]:
    """A world in which the first message from a server that ``when`` picks is lost, and all that is in flight with it."""

    class Breaking(World):
        def run(self) -> World:
            for server in self.servers:
                self._watch(server)
            return super().run()

        def _watch(self, server: SimServer) -> None:
            send, done = server._send, [False]

            def watched(effect: Send) -> None:
                send(effect)
                if when(effect.header) and not done[0]:
                    done[0] = True
                    effect.peer.owner.cut(everything=True)

            server._send = watched  # type: ignore[method-assign]

    return Breaking


@pytest.mark.parametrize("local", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Kind.ACK, Kind.RESULT, Kind.WINDOW])
def test_a_lost_answer_is_given_again_and_nothing_is_counted_twice(kind: Kind, local: float) -> None:
    world = simulate(quiet(workers=2, parts=(1,), steps=3, local=local, credit_parts=1, window_bytes=1), breaking(lambda h: h.kind == kind))
    assert world.network.cuts == 1
    asked, resent = (sum(getattr(worker.client.counts, what) for worker in world.workers) for what in ("asked", "resent"))
    assert (asked > 0) == (kind != Kind.WINDOW), "what was pushed, and what was accepted, is asked after"
    assert resent == 0, "the server has it"
    again = world.sizes[make_key(1, 0, 0)][1] if kind == Kind.RESULT else 0
    assert world.network.carried == world.needed_bytes() + again, "of payloads only the one that was lost is sent again"


@pytest.mark.parametrize("local", [0.0, 1.0])
def test_a_lost_push_is_sent_again_when_the_server_says_that_it_lacks_it(local: float) -> None:
    def breaking_pushes(scenario: Any) -> World:
        world = World(scenario)
        send = Line.send

        def watched(line: Line, header: Header, body: Any = None, place: Any = None) -> None:
            send(line, header, body, place)
            if header.kind == Kind.PUSH and not world.network.cuts:
                line.cut(everything=True)

        monkeypatch.setattr(Line, "send", watched)
        return world

    with pytest.MonkeyPatch.context() as monkeypatch:
        world = simulate(quiet(workers=2, parts=(1,), steps=2, local=local), breaking_pushes)
    assert [sum(getattr(worker.client.counts, what) for worker in world.workers) for what in ("asked", "resent")] == [1, 1]
    assert world.network.carried == world.needed_bytes() + world.sizes[make_key(1, 0, 0)][0]


@pytest.mark.parametrize("slower", [1, 10, 100, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_over_a_link_of_any_speed_each_payload_is_sent_once(slower: int, seed: int) -> None:
    """At 20 kB/s a payload takes almost half a second, many queue at each end, and an answer waits behind all of them."""
    weather = Weather(delay_s=0.02, slow=0.0, repeats=0.0, rate=SLOWEST_RATE * 1000 / slower)
    scenario = quiet(seed=seed, workers=3, servers=2, parts=(3, 3, 2), steps=3, local=0.0, codec="onebit", weather=weather, saves=0.5)
    world = simulate(scenario)
    assert world.network.carried == world.needed_bytes()
    assert [sum(getattr(worker.client.counts, what) for worker in world.workers) for what in ("asked", "resent")] == [0, 0]
    parts = [len(bucket.parts) for bucket in world.workers[0].layouts["model"].buckets]
    if slower < 1000:
        assert parts == [3, 3, 2], "as asked: a message takes far less than half a second"
    else:
        assert parts > [3, 3, 2], "parts are smaller"
    for worker in world.workers:
        assert worker.client is not None
        assert worker.client.speed.rate == pytest.approx(weather.rate, rel=0.6), "20 ms of jitter in 100 ms, at the least"


@pytest.mark.parametrize(("credit_parts", "order"), [(-1, [0, 1, 2, 3]), (0, [2, 3, 0, 1])])
def test_parts_of_one_bucket_leave_in_the_order_that_they_have_everywhere(credit_parts: int, order: list[int]) -> None:
    """Whichever a rank has encoded first: a server answers when it has a part from all. With a credit of 0, first come, first served."""
    client = Client(0, job=1, epoch=1, server_count=1, credit_parts=credit_parts)
    client.parts = {key: PartState(PartPlace(key, 0, 1, 0, key, 10, 0, f"t{key}"), 7) for key in range(4)}
    client.connected(0, 0.0, queues=False)
    submitted = [action for key in (2, 3, 0, 1) for action in client.submit(key, 0.0, 10)]
    assert submitted == [], "the window is not open"
    sent = client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    assert [action.header.key for action in sent] == order


def test_a_gradient_of_high_priority_waits_for_two_payloads_and_not_for_all_that_are_ready() -> None:
    client = Client(0, job=1, epoch=1, server_count=1)
    client.parts = {key: PartState(PartPlace(key, 0, 1, 0, key, 10, 0, f"t{key}"), key) for key in range(10)}
    client.connected(0, 0.0, queues=True)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    sent: list[Any] = []
    for key in range(9):
        sent += client.submit(key, 0.0, 10)
    sent += client.submit(9, 0.0, 10)
    assert [action.header.key for action in sent] == [0, 1], "two wait in the connection's queue"
    (then,) = client.departed(0, 1, 0.0)
    assert isinstance(then, Transmit)
    assert then.header.key == 9, "of those that wait here the highest priority goes next"
    (after,) = client.departed(0, 1, 0.0)
    assert isinstance(after, Transmit)
    assert after.header.key == 8
    client.disconnected(0)
    asked = [action.header for action in client.connected(0, 0.0, queues=True) if isinstance(action, Transmit)]
    assert [(Kind(header.kind).name, header.key) for header in asked if header.kind == Kind.PULL] == [("PULL", key) for key in (0, 1, 8, 9)]
    assert [header.key for header in asked if header.kind == Kind.PUSH] == [7, 6], "what was in the old queue is gone"


def test_without_a_queue_of_the_connections_own_only_credit_limits_what_is_sent() -> None:
    client = Client(0, job=1, epoch=1, server_count=1, credit_bytes=50)
    client.parts = {key: PartState(PartPlace(key, 0, 1, 0, key, 10, 0, f"t{key}"), key) for key in range(10)}
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    sent = 0
    for key in range(10):
        sent += len(client.submit(key, 0.0, 10))
    assert sent == 5


def test_a_skip_beside_a_push_adds_nothing_and_the_skipper_gets_the_sum() -> None:
    def worded(scenario: Any) -> World:
        world = World(scenario)
        world.oracle.words[1, 0, 1] = Word(frozenset({1}), (frozenset(),), frozenset())
        return world

    world = simulate(quiet(workers=2, parts=(1,), steps=1), worded)
    ((_, value),) = world.servers[0].slots.items()
    assert [[payload[3] for payload in block] for block in value[3]] == [[0]]
    assert world.servers[0].committed[make_key(1, 0, 0)].contributors == 1
    assert [worker.results for worker in world.workers] == [1, 1]


def test_of_a_step_that_the_trainer_skipped_only_what_was_not_poisoned_is_added_back() -> None:
    """A bucket of two parts; in step 2 rank 1's second part holds a NaN, so the trainer (AMP) applies neither part of step 2."""
    nobody: frozenset[int] = frozenset()

    def worded(scenario: Any) -> World:
        world = World(scenario)
        world.oracle.words[1, 0, 1] = Word(nobody, (nobody, nobody), nobody)
        world.oracle.words[1, 0, 2] = Word(nobody, (nobody, frozenset({1})), nobody)
        world.oracle.words[1, 0, 3] = Word(nobody, (nobody, nobody), nobody, previous_skipped=True, rescale=2.0)
        return world

    world = simulate(quiet(workers=2, servers=1, parts=(2,), steps=3, codec="onebit"), worded)
    server = world.servers[0]
    whole, poisoned = (server.slots[key, server.committed[key].slot] for key in (make_key(1, 0, 0), make_key(1, 0, 1)))
    assert whole[4:] == (name_of_residual(whole[1], 2), name_of_result(whole[1], 2), 2.0)
    assert poisoned[4:] == (name_of_residual(poisoned[1], 1), None, 2.0), "its residual is step 1's, and there is nothing to add back"


def test_what_a_server_has_sent_it_remembers_wherever_it_dies() -> None:
    """Carry out a step's effects on a real store and stop after each: a result that left is the one the store has on record."""
    key = make_key(1, 0, 0)
    for dies_after in range(5):
        store = Store()
        shape = KeyShape(key, 8, 2)
        store.add_keys([shape])
        state = KeyState(KeySpec(key, 2, range(2), 0, 0, pull_feedback=True))
        for step in (1, 2):
            actions: list[Any] = []
            for rank in range(2):
                actions += state.contribute(rank, Header(Kind.PUSH, Flag.WANT_RESULT, key=key, step=step, sender=rank), b"payload")
            (fold,) = [a for a in actions if isinstance(a, Fold)]
            store.keys[key].result(fold.slot)[:] = step
            residuals = store.keys[key].residuals()
            assert residuals is not None
            residuals[1][:] = step
            effects = state.folded(True, 8, False, fold.slot)
            assert [type(e) for e in effects] == [Commit, Reply, Reply]
            sent = carry_out(effects[: dies_after if step == 2 else 3], store, key)
        result = store.keys[key].kept.result
        assert result is not None
        assert all(result.step == step for step in sent)
        assert result.step == (1 if dies_after == 0 else 2)
        assert (store.keys[key].result(result.slot) == result.step).all(), "the record names a whole result"
        current = store.keys[key].residuals()
        assert current is not None
        np.testing.assert_array_equal(current[0], result.step)
        store.close()


def carry_out(effects: list[Any], store: Store, key: int) -> list[int]:
    """What the server's loop does; returns the steps whose results have left."""
    sent = []
    for effect in effects:
        if isinstance(effect, Commit):
            store.keys[key].commit(effect)
        elif effect.result is not None:
            sent.append(effect.header.step)
    return sent


# residuals that are saved and restored

KEY = make_key(1, 0, 0)
NUMEL = RESIDUAL_NUMEL + 10


def a_key(**fields: Any) -> KeyState:
    return KeyState(KeySpec(KEY, NUMEL, range(2), 0, 0, pull_feedback=True), **fields)


def after(steps: int, *, previous_skipped: bool = False, rescale: float = 1.0) -> KeyState:
    """A key that two ranks have taken some steps of; flags and rescale are of the last."""
    state = a_key()
    for step in range(1, steps + 1):
        last = step == steps
        flags = Flag.WANT_RESULT | (Flag.PREVIOUS_SKIPPED if last and previous_skipped else Flag.NONE)
        push = Header(Kind.PUSH, flags, key=KEY, step=step, rescale=rescale if last else 1.0)
        actions = [action for rank in range(2) for action in state.contribute(rank, push, b"payload")]
        (fold,) = [action for action in actions if isinstance(action, Fold)]
        state.folded(True, 8, False, fold.slot)
    return state


def question(step: int, first: int = 0, flags: int = Flag.NONE) -> Header:
    return Header(Kind.RESIDUAL, flags, key=KEY, step=step, contributors=first)


def restoring(first: int, numel: int = 10, rescale: float = 1.0) -> Header:
    return Header(Kind.RESTORE, key=KEY, contributors=first, rescale=rescale, payload_bytes=4 * numel)


def test_a_residual_is_told_after_the_ranks_own_last_step_and_to_nobody_who_has_gone_on() -> None:
    state = after(3)
    (lent,) = state.residual(0, question(3))
    assert isinstance(lent, Lend)
    assert (lent.add_back, lent.header.payload_bytes, lent.header.step) == (NO_SLOT, 4 * RESIDUAL_NUMEL, 3)
    (rest,) = state.residual(0, question(3, RESIDUAL_NUMEL))
    assert isinstance(rest, Lend)
    assert rest.header.payload_bytes == 4 * 10
    assert state.residual(0, question(2)) == [], "a question of before its last step"
    state.contribute(0, Header(Kind.PUSH, key=KEY, step=4), b"payload")
    assert state.residual(0, question(3)) == [], "it has pushed since: the question is an old one"
    assert state.residual(1, question(3)), "the other has not"
    for wrong, words in ((question(4), "is at step 4"), (question(3, NUMEL), "from element")):
        with pytest.raises(RemoteProtocolError, match=words):
            state.residual(1, wrong)
    with pytest.raises(RemoteProtocolError, match="it keeps none"):
        KeyState(KeySpec(KEY, NUMEL, range(2), 0, 0)).residual(0, question(0))


def test_what_the_trainer_did_not_apply_is_added_to_what_is_told_and_nothing_changes() -> None:
    state = after(3)
    (lent,) = state.residual(0, question(3, flags=Flag.PREVIOUS_SKIPPED))
    assert isinstance(lent, Lend)
    assert lent.add_back == state.last_slot
    assert not state.add_back
    (lent,) = state.residual(1, question(3))
    assert isinstance(lent, Lend)
    assert lent.add_back == NO_SLOT


def test_what_waits_for_a_payload_is_told_to_the_last_bit() -> None:
    """A step that was not applied, then one whose sum is not finite: the result still owed, and the unit's change, are in what is told."""
    state = after(2)
    for rank in range(2):
        state.contribute(rank, Header(Kind.SKIP, Flag.PREVIOUS_SKIPPED, key=KEY, step=3, rescale=0.1), None)
    (lent,) = state.residual(0, question(3))
    assert isinstance(lent, Lend)
    assert lent.add_back == state.last_slot
    assert unpack_header(pack_header(lent.header)).rescale == state.rescale


def test_a_restore_is_set_once_whenever_its_repeats_come() -> None:
    state = a_key()
    first = state.restore(0, restoring(0, RESIDUAL_NUMEL, rescale=0.5), b"elements")
    assert [type(action) for action in first] == [Restore, Reply]
    assert state.rescale == 0.5
    assert [type(action) for action in state.restore(0, restoring(0, RESIDUAL_NUMEL), b"elements")] == [Reply]
    assert [type(action) for action in state.restore(1, restoring(RESIDUAL_NUMEL), b"elements")] == [Restore, Reply]
    state.contribute(0, Header(Kind.PUSH, key=KEY, step=1), b"payload")
    assert [type(action) for action in state.restore(1, restoring(RESIDUAL_NUMEL), b"elements")] == [Reply], "its answer was lost"
    with pytest.raises(RemoteProtocolError, match="after its first step has begun"):
        state.restore(1, restoring(0, 5), b"elements")


@pytest.mark.parametrize(("first", "numel"), [(0, 0), (0, RESIDUAL_NUMEL + 1), (NUMEL - 5, 6), (NUMEL, 1)])
def test_a_restore_of_elements_that_are_not_there_is_refused(first: int, numel: int) -> None:
    with pytest.raises(RemoteProtocolError):
        a_key().restore(0, restoring(first, numel), b"elements")


def test_a_lent_residual_is_the_residual_and_the_result_and_leaves_both() -> None:
    codec = parse_codec("onebit")
    store, numel = Store(), 5000
    store.add_keys([KeyShape(KEY, codec.payload_bound(numel), numel)])
    keys, generator = store.keys[KEY], np.random.default_rng(0)
    work = KeyWork(KeySpec(KEY, numel, range(2), 0, 0, pull_feedback=True), CodecPair(codec, codec), 0, 0, False)
    values, result = (generator.standard_normal(numel).astype(np.float32) for _ in range(2))
    keys.restore(0, values[:4000].tobytes())
    keys.restore(4000, values[4000:].tobytes())
    np.testing.assert_array_equal(Engine.lend(work, keys, 0, NO_SLOT), values)
    written = codec.encode(result, None, 1.0, Stream(0, 0, 0, 0), keys.result(1)).payload_bytes
    keys.commit(Commit(KEY, Result(1, Flag.NONE, 2, 1, written), False))
    decoded = np.empty(numel, np.float32)
    codec.decode(keys.result(1)[:written], numel, 0, numel, decoded)
    for _ in range(2):
        np.testing.assert_array_equal(Engine.lend(work, keys, 1, 1), values + decoded)
        np.testing.assert_array_equal(Engine.lend(work, keys, 1, NO_SLOT), values)
    with pytest.raises(PayloadError, match="NaN"):
        keys.restore(0, np.full(3, np.nan, np.float32).tobytes())


@pytest.mark.parametrize("numel", [1000, 100_000])
def test_a_fold_is_the_same_here_and_in_the_pool(numel: int) -> None:
    codec = parse_codec("int8")
    store, told = Store(), queue.SimpleQueue[Any]()
    store.add_keys([KeyShape(KEY, codec.payload_bound(numel), numel)])
    work = KeyWork(KeySpec(KEY, numel, range(2), 0, 0, pull_feedback=True), CodecPair(codec, codec), 0, 0, False)
    payloads = []
    for rank in range(2):
        out = np.empty(codec.payload_bound(numel), np.uint8)
        gradient = np.random.default_rng(rank).standard_normal(numel).astype(np.float32)
        payloads.append(out[: codec.encode(gradient, None, 1.0, Stream(0, 1, rank, 0), out).payload_bytes])
    fold = Fold(KEY, 1, tuple(payloads), fresh=True, last=True, slot=0)
    engine = Engine(1, told.put, told.put)
    try:
        engine.start(fold, work, store.keys[KEY])
        there = told.get(timeout=60), store.keys[KEY].result(0).tobytes()
        store.keys[KEY].result(0)[:] = 0
        assert (engine.run(fold, work, store.keys[KEY]), store.keys[KEY].result(0).tobytes()) == there
    finally:
        engine.close()
    store.close()


def test_a_worker_takes_only_the_answer_about_its_own_last_step_and_says_what_was_lost_again() -> None:
    client = a_client()
    client.connected(0, 0.0)
    transfers = [Transfer(0, 0, step=7), Transfer(1, 0, step=7, payload=b"4444", rescale=0.5)]
    said = [action for action in client.transfer(transfers, 0.0) if isinstance(action, Transmit)]
    assert [(t.header.kind, t.header.step, t.body, t.header.rescale) for t in said] == [
        (Kind.RESIDUAL, 7, None, 1.0), (Kind.RESTORE, 7, b"4444", 0.5),
    ]  # fmt: skip
    answer = Header(Kind.RESIDUAL, job=1, epoch=1, key=0, step=6, sender=SERVER_SENDER, rescale=2.0)
    assert client.receive(0, answer, b"old", 0.0) == []
    (done,) = client.receive(0, answer._replace(step=7), b"now", 0.0)
    assert done == Transferred(transfers[0])
    assert (transfers[0].answer, transfers[0].rescale) == (b"now", 2.0)
    assert client.receive(0, answer._replace(step=7), b"now", 0.0) == [], "a repeat"
    client.disconnected(0)
    assert [a.header.kind for a in client.connected(0, 0.0) if isinstance(a, Transmit)] == [Kind.RESTORE]
    (text,) = client.tick(9.0)
    assert text.startswith("waiting for server 0 for 9 s: its residual of key 0.0.1")


def a_client() -> Client:
    client = Client(0, job=1, epoch=1, server_count=1, credit_parts=1)
    client.parts = {key: PartState(PartPlace(key, 0, 1, 0, key, 2, 0, f"t{key}"), 0) for key in range(2)}
    return client


def from_server(kind: Kind, key: int = 0, step: int = 1, **fields: Any) -> Header:
    return Header(kind, job=1, epoch=1, plan=1, key=key, step=step, sender=SERVER_SENDER, **fields)


def test_silence_alone_has_nothing_said_again() -> None:
    """Not for a push without answer, nor for a window that does not grow, nor for a residual: on a live connection all of it is on its way."""
    client = a_client()
    client.connected(0, 0.0)
    assert client.submit(0, 0.0, 10) == []
    (push,) = client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    assert isinstance(push, Transmit)
    assert push.header.kind == Kind.PUSH
    client.transfer([Transfer(1, 0, step=7)], 0.0)
    said = [line for now in range(1, 600) for line in client.tick(float(now))]
    assert any("step 1 of 't0' (key 0.0.0) is sent, not yet accepted" in line for line in said)
    assert (client.counts.asked, client.counts.resent) == (0, 0)


def test_a_part_that_the_server_has_is_named_by_the_server_and_any_other_by_the_worker() -> None:
    client = a_client()
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    client.submit(0, 0.0, 10)
    assert client.tick(4.9) == []
    assert client.tick(5.0) == ["waiting for server 0 for 5 s: step 1 of 't0' (key 0.0.0) is sent, not yet accepted"]
    client.receive(0, from_server(Kind.ACK), None, 0.0)
    times = [now for now in range(6, 80) if client.tick(float(now), told=7.0)]
    assert times == [73], "the server said at second 7 whom it awaits, and has been silent for long"


def test_a_server_names_the_ranks_that_steps_await_in_one_line_and_again_ever_more_rarely() -> None:
    server = ServerState(0, 2, 1, 1, step_timeout_s=1000)
    server.joined("w0", 0)
    layout = a_layout()
    server.register(layout, *specs_of(layout, 0, 2))
    for part in layout.parts():
        server.receive("w0", Header(Kind.SKIP, job=1, epoch=1, plan=1, key=part[1].key, step=1, sender=0), None, 0.0)
    texts = {now: text for now in range(100) for text in server.tick(float(now))[0]}
    assert list(texts) == [5, 15, 35, 75]
    assert texts[15] == "step 1 of key 1.0.0 (a) (and 1 more keys) has awaited rank(s) 1 for 15 s"


def test_what_moves_slowly_is_not_late_and_what_stands_still_is() -> None:
    """Ten payloads of 4 s each over one connection, then silence."""
    client = Client(0, job=1, epoch=1, server_count=1)
    client.parts = {key: PartState(PartPlace(key, 0, 1, 0, key, 10, 0, f"t{key}"), 0) for key in range(10)}
    client.connected(0, 0.0, queues=True)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    for key in range(10):
        client.submit(key, 0.0, 10)
    said = {}
    for now in range(1, 60):
        if now % 4 == 0 and now <= 40:
            client.departed(0, 1 if now < 40 else 0, float(now))
        if lines := client.tick(float(now)):
            said[now] = lines
    assert min(said) == 45, said


def test_a_step_is_not_late_and_no_job_ends_while_the_awaited_rank_goes_on_with_other_keys_of_the_layout() -> None:
    server = ServerState(0, 2, 1, 1, step_timeout_s=30.0, absence=Absence(60.0))
    server.joined("w0", 0)
    server.joined("w1", 1)
    layout = a_layout()
    server.register(layout, *specs_of(layout, 0, 2))
    keys = [part.key for _, part in layout.parts()]

    def skip(rank: int, key: int, now: float) -> None:
        server.receive(f"w{rank}", Header(Kind.SKIP, job=1, epoch=1, plan=1, key=key, step=1, sender=rank), None, now)

    skip(0, keys[0], 0.0)
    skip(0, keys[1], 0.0)
    assert server.tick(4.0) == ([], [])
    skip(1, keys[0], 29.0)
    assert server.tick(33.0) == ([], [])
    assert server.tick(35.0)[0] == ["step 1 of key 1.1.0 (b) has awaited rank(s) 1 for 35 s"]
    assert server.tick(58.0)[1] == []
    (fault,) = server.tick(59.5)[1]
    assert "more than the limit of 30 s (PSGC_STEP_TIMEOUT_S)" in fault.text
    assert fault.awaited == (1,)


def test_a_server_that_was_down_hears_of_a_retired_layout_when_it_is_back() -> None:
    """All ranks say it within moments, in which its process may be started again: it serves the layout from what the former one has kept."""
    client = Client(0, job=1, epoch=1, server_count=2)
    for number in (0, 1):
        client.connected(number, 0.0)
    client.disconnected(1)
    (said,) = client.retire(1)
    assert isinstance(said, Transmit) and (said.server, said.header.kind, said.header.plan) == (0, Kind.RETIRE, 1)
    greet, repeated, *_ = client.connected(1, 0.0)
    assert greet == Greet(1) and repeated == Transmit(1, said.header)
    server = ServerState(1, 2, 1, 1)
    layout = a_layout()
    server.register(layout, *specs_of(layout, 0, 2))
    for peer in ("first", "again"):
        server.proved(peer, 0)
        server.receive(peer, Header(Kind.HELLO, job=1, epoch=1, sender=0), None, 0.0)
        freed = [effect for effect in server.receive(peer, said.header, None, 0.0) if isinstance(effect, Retire)]
        assert len(freed) == (peer == "first"), "a repeat changes nothing"
    assert not server.keys


def test_of_retired_layouts_the_last_ones_are_repeated() -> None:
    client = Client(0, job=1, epoch=1, server_count=1)
    for layout in range(1, 101):
        assert client.retire(layout) == []
    said = [action.header.plan for action in client.connected(0, 0.0) if isinstance(action, Transmit) and action.header.kind == Kind.RETIRE]
    assert said == list(range(37, 101))


def a_layout() -> Layout:
    tensors = (TensorSpec("a", (100,), "float32"), TensorSpec("b", (100,), "float32"))
    declaration = Declaration("m", "plan", tensors, "none", True, order=(0, 1), used=(0, 1), fuse_bytes=0)
    return build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset((0, 1)))


def test_a_result_that_overtakes_a_repeat_of_the_push_ends_the_step_and_later_words_on_it_change_nothing() -> None:
    client = a_client()
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    client.submit(0, 0.0, 10)
    client.disconnected(0)
    assert [type(a) for a in client.connected(0, 0.0)] == [Greet, Transmit]
    assert len(client.receive(0, from_server(Kind.RESULT), b"r", 0.0)) == 1
    client.taken(0)
    for kind in (Kind.ACK, Kind.RESULT):
        assert client.receive(0, from_server(kind), b"r", 0.0) == []
    client.submit(0, 2.0, 10)
    for kind in (Kind.ACK, Kind.RESULT):
        assert client.receive(0, from_server(kind), b"r", 0.0) == []
    assert client.parts[0].phase is Phase.SENT
    assert client.servers[0].sending.parts_in_flight == 1


def test_words_of_a_connection_that_has_been_replaced_are_refused_and_the_worker_heeds_no_refusal() -> None:
    server = ServerState(0, 1, 1, 1)
    server.joined("first", 0)
    server.joined("second", 0)
    (refusal,) = server.receive("first", Header(Kind.PULL, job=1, epoch=1, sender=0), None, 0.0)
    assert isinstance(refusal, Send)
    assert (refusal.peer, refusal.header.kind) == ("first", Kind.ERROR)
    assert server.peers == {0: "second"}
    client = a_client()
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    client.submit(0, 0.0, 10)
    error = from_server(Kind.ERROR)._replace(payload_bytes=len(refusal.body))
    assert client.receive(0, error, refusal.body, 0.0) == [], "what was refused is asked after on the new connection"


def test_a_result_is_queued_once_on_a_connection_and_again_on_the_next() -> None:
    server = ServerState(0, 2, 1, 1)
    layout = a_layout()
    server.register(layout, *specs_of(layout, 0, 2))
    key = next(layout.parts())[1].key

    def hear(rank: int, kind: Kind, **fields: Any) -> list[Any]:
        header = Header(kind, job=1, epoch=1, plan=1, sender=rank, **fields)
        effects = server.receive(f"w{rank}.{numbers[rank]}", header, None, 0.0)
        return [(Kind(e.header.kind).name, e.result_slot) for e in effects if isinstance(e, Send)]

    numbers = {0: 1, 1: 1}
    for rank in (0, 1):
        server.joined(f"w{rank}.1", rank)
        hear(rank, Kind.PUSH, flags=Flag.WANT_RESULT, key=key, step=1)
    sent = [effect for effect in server.folded(key, True, 8, False, 0, 0.0) if isinstance(effect, Send)]
    assert [effect.header.kind for effect in sent] == [Kind.RESULT, Kind.RESULT]
    assert hear(0, Kind.PULL, key=key, step=1) == [("ACK", None)], "it is on its way"
    assert hear(0, Kind.PUSH, key=key, step=1) == [("ACK", None)]
    numbers[0] = 2
    server.joined("w0.2", 0)
    assert hear(0, Kind.PULL, key=key, step=1) == [("RESULT", 0)]
    assert hear(0, Kind.PULL, key=key, step=1) == [("ACK", None)]
    assert hear(1, Kind.PULL, key=key, step=1) == [("ACK", None)], "the other rank's connection is the one it was"


def test_a_question_is_followed_by_one_payload_however_often_it_is_answered() -> None:
    client = a_client()
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    client.submit(0, 0.0, 10)
    body = encode_body(Notice(ErrorCode.PUSH_MISSING, "no push"))
    missing = from_server(Kind.ERROR)._replace(payload_bytes=len(body))
    assert client.receive(0, missing, body, 0.0) == [], "nobody asked"
    client.disconnected(0)
    client.connected(0, 0.0)
    (push,) = client.receive(0, missing, body, 0.0)
    assert isinstance(push, Transmit)
    assert push.payload
    assert client.receive(0, missing, body, 0.0) == []
    assert client.servers[0].sending.parts_in_flight == 1


def test_a_payload_may_be_overwritten_once_its_result_begins_to_come_and_a_server_that_then_lacks_it_ends_the_job() -> None:
    """The result of another step, of another server or of a step that is over is not received there."""
    client = a_client()
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    client.submit(0, 0.0, 10)
    coming = from_server(Kind.RESULT, step=1)
    for other in (
        coming._replace(step=2),
        coming._replace(kind=Kind.ACK),
        coming._replace(epoch=9),
        coming._replace(job=9),
        coming._replace(key=77),
    ):
        assert not client.awaits(0, other)
    assert not client.awaits(1, coming._replace(sender=SERVER_SENDER + 1))
    assert client.awaits(0, coming)
    client.disconnected(0)  # before all of it has come
    client.connected(0, 0.0)
    assert client.awaits(0, coming), "the server sends it again"
    body = encode_body(Notice(ErrorCode.PUSH_MISSING, "no push"))
    (failed,) = client.receive(0, from_server(Kind.ERROR, step=1)._replace(payload_bytes=len(body)), body, 0.0)
    assert isinstance(failed, Failed)
    assert failed.text == "server 0 lacks this worker's push of step 1 of key 0.0.0, whose result it had begun to send"
    client.receive(0, coming, None, 0.0)
    assert not client.awaits(0, coming), "the trainer may have changed what it got"


def hears_of_skipped_steps(client: Client, skips: bool = False) -> Iterator[Action]:
    """What a client does that hears of step after step that every rank skipped it, though it has a gradient itself. skips: it has none in the first step."""
    client.connected(0, 0.0)
    client.receive(0, from_server(Kind.HELLO), None, 0.0)
    client.receive(0, from_server(Kind.WINDOW, step=OPEN), None, 0.0)
    for step in itertools.count(1):
        client.submit(0, 0.0, 10, skip=skips and step == 1)
        (action,) = client.receive(0, from_server(Kind.RESULT, step=step, flags=Flag.SKIPPED), None, 0.0)
        yield action
        client.taken(0)


def test_a_rank_that_has_a_gradient_and_hears_that_every_rank_skipped_ends_the_job() -> None:
    first, second = itertools.islice(hears_of_skipped_steps(a_client(), skips=True), 2)
    assert not isinstance(first, Failed)
    assert isinstance(second, Failed)
    assert second.text == "server 0 says that every rank skipped step 2 of 't0' (key 0.0.0), to which this rank has contributed a gradient"


def test_unless_it_has_come_back_and_the_step_may_have_been_taken_without_it_or_its_sum_come_past_it() -> None:
    client = a_client()
    client.incarnation = 2
    assert [isinstance(action, Failed) for action in itertools.islice(hears_of_skipped_steps(client), 3)] == [False, False, True]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 40), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60)
)  # fmt: skip
def test_a_window_holds_room_for_exactly_what_it_has_admitted(costs: list[int], budget: int, moves: list[Any]) -> None:
    """Parts complete in any order, admitted ones as they are pushed, others because every rank skipped them."""
    window = Window(costs, budget)
    done = [0] * len(costs)
    n = len(costs)
    for pick, skipped in moves:
        part = pick % n
        if done[part] - min(done) >= 1 or not (skipped or window.admits(part, done[part] + 1)):
            continue
        done[part] += 1
        window.complete(part, done[part])
        if window.limit == OPEN:
            assert sum(costs) <= budget
            continue
        held = [costs[p % n] for p in range(window.limit) if p // n >= done[p % n]]
        assert window._reserved == sum(held)
        assert sum(held) <= budget or len(held) == 1
        first = min(step * n + p for p, step in enumerate(done))
        assert window.limit > first, "what is first in order can always be pushed"


def test_a_channel_keeps_order_and_loses_only_an_end() -> None:
    """What is said of connections in sim_network.py is what its channels do."""
    lengths = set()
    network = Network(Clock(), random.Random(3), Weather(slow=0.5, repeats=0.0))
    for _ in range(200):
        heard: list[int] = []
        channel = Channel(network, lambda header, _, heard=heard: heard.append(header.step))
        for step in range(10):
            channel.put(Header(Kind.PUSH, step=step), None)
        channel.lose(everything=False)
        network.clock.at(network.clock.now + 10.0, heard.append, -1)
        while heard[-1:] != [-1]:
            network.clock.step()
        assert heard[:-1] == list(range(len(heard) - 1))
        lengths.add(len(heard) - 1)
    assert lengths == set(range(11))


def test_a_layout_that_was_replaced_is_forgotten_once_and_late_words_about_it_are_nobodys() -> None:
    server = ServerState(0, 2, 1, 1)
    layout = a_layout()
    server.register(layout, *specs_of(layout, 0, 2))
    key = next(layout.parts())[1].key

    def hear(rank: int, kind: Kind, **fields: Any) -> list[Any]:
        return server.receive(f"w{rank}", Header(kind, job=1, epoch=1, plan=1, sender=rank, **fields), None, 0.0)

    for rank in (0, 1):
        server.joined(f"w{rank}", rank)
    hear(0, Kind.PUSH, key=key, step=1)
    (refusal,) = hear(1, Kind.RETIRE)
    assert b"worker 1: retires layout 1, but key" in refusal.body, "a step is under way"
    hear(1, Kind.PUSH, key=key, step=1)
    server.folded(key, True, 8, False, 0, 0.0)
    assert hear(1, Kind.RETIRE) == [Retire(tuple(part.key for _, part in layout.parts()))]
    assert hear(0, Kind.RETIRE) == []
    for kind in (Kind.PUSH, Kind.SKIP, Kind.PULL, Kind.RESIDUAL, Kind.RESTORE):
        assert hear(0, kind, key=key, step=1) == [], "a repeat from a connection that was replaced: its rank has the answer"
    assert server.register(layout, *specs_of(layout, 0, 2)) == []
    assert server.keys == server.windows == {}
    assert server.tick(1000.0) == ([], [])
