"""What a server commits its standby has: a process that reads the standby's memory finds what one that follows the server finds in the server's own."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.layout.update_rule import UpdateRule
from psgc.server.blocks import BlockId, Written
from psgc.server.loop import Server
from psgc.server.mirror import Mirror
from psgc.server.replica import GO_ON, PIECE_BYTES, What, messages
from psgc.server.step import NO_SLOT, Commit, Fold, Result
from psgc.server.store import KeyShape, Store
from psgc.server.weights.kept import AnswerCommit, VersionCommit
from psgc.wire.frames import Header, Kind

KEY, OTHER, NUMEL = 7, 8, 5001
SHAPES = [KeyShape(KEY, 1000, NUMEL), KeyShape(OTHER, 500, 0)]
RULES = ("add", "average", "nesterov:lr=0.7,momentum=0.9", "delayed:learners=3")


class Standby:
    """A mirror, and the connection to it. lacks: how many of the next messages are lost."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.labelled: set[BlockId] = set()

    def hear(self, written: Iterable[Written], most: int = 1 << 30) -> int:
        """Returns how many messages there were; ``most``: the connection breaks behind so many."""
        told = list(messages(written, self.labelled))
        for header, data in told[:most]:
            assert self.mirror.take(header, data.copy()) is None
        return len(told)

    def reconnected(self) -> None:
        self.labelled.clear()

    def taken_over(self) -> Store:
        """The store of a process that takes the server's place."""
        store = Store(self.mirror.segments)
        store.add_keys(SHAPES)
        return store


def commit(store: Store, key: int, step: int, slot: int, residual: bool, **pending: Any) -> Commit:
    """A step of a key, whose numbers follow from it."""
    of_key, rng = store.keys[key], np.random.default_rng(100 * key + step)
    nbytes = 300 + step
    if slot != NO_SLOT:
        of_key.result(slot)[:nbytes] = rng.integers(0, 256, nbytes, np.uint8)
    if residual:
        buffers = of_key.residuals()
        assert buffers is not None
        buffers[1][:] = rng.standard_normal(NUMEL, np.float32)
    made = Commit(key, Result(step, 0, 2, slot, nbytes if slot != NO_SLOT else 0), residual, **pending)
    of_key.commit(made)
    return made


def same(one: Store, other: Store) -> None:
    for key, of_key in one.keys.items():
        copy = other.keys[key]
        assert copy.kept == of_key.kept
        if (slot := of_key.kept.newest) != NO_SLOT:
            length = of_key.recorded_bytes(slot)
            assert copy.recorded_bytes(slot) == length
            assert copy.result(slot)[:length].tobytes() == of_key.result(slot)[:length].tobytes()
        if (residuals := of_key.residuals()) is not None:
            copied = copy.residuals()
            assert copied is not None and copied[0].tobytes() == residuals[0].tobytes()


STEPS: list[tuple[int, int, int, bool, dict[str, Any]]] = [
    (KEY, 1, 0, True, {}), (OTHER, 1, 0, False, {}), (KEY, 2, NO_SLOT, False, {"add_back": True, "rescale": 0.5}), (KEY, 3, 1, True, {}),
    (OTHER, 2, 1, False, {}), (KEY, 4, 0, True, {"rescale": 2.0}), (OTHER, 3, NO_SLOT, False, {}),
]  # fmt: skip


def test_a_standby_has_each_step_that_was_committed() -> None:
    store, standby = Store(), Standby()
    store.add_keys(SHAPES)
    for key, *step, pending in STEPS:
        standby.hear(store.keys[key].written(commit(store, key, *step, **pending)))
        same(store, standby.taken_over())


def test_a_standbys_launcher_hears_once_that_it_has_all_that_its_server_keeps() -> None:
    """And so starts its next process again however often that was so. Behind a part of what a connection is sent first comes GO_ON."""
    told: list[str] = []
    server: Any = object.__new__(Server)
    server._serving = SimpleNamespace(wire_bytes=0, replica=None)
    server._links = SimpleNamespace(touch=lambda link: None, received=lambda link: None)
    server._launcher, server._stepped = SimpleNamespace(tell=told.append), False
    mirror = Mirror()
    for mark, said in ((GO_ON, []), (3, ["stepped"]), (4, ["stepped"])):
        header = Header(Kind.REPLICA, step=mark, contributors=What.MARK)
        link: Any = SimpleNamespace(receive=lambda header=header: [(header, None)], send=lambda answer: None, closed=False)
        server._hear_server(link, mirror)
        assert told == said


@pytest.mark.parametrize("lacking", range(len(STEPS)))
def test_a_connection_that_breaks_anywhere_leaves_the_step_before_and_the_next_one_brings_all(lacking: int) -> None:
    store, before, standby = Store(), Store(), Standby()
    for each in (store, before):
        each.add_keys(SHAPES)
    for key, *step, pending in STEPS[:lacking]:
        standby.hear(store.keys[key].written(commit(store, key, *step, **pending)))
        commit(before, key, *step, **pending)
    key, *step, pending = STEPS[lacking]
    made = commit(store, key, *step, **pending)
    count = len(list(messages(store.keys[key].written(made), set())))
    for most in range(count):
        standby.reconnected()
        standby.hear(store.keys[key].written(made), most)
        same(before, standby.taken_over())
    standby.reconnected()
    for of_key in store.known:
        standby.hear(store.written(of_key))
    same(store, standby.taken_over())


def test_a_restored_residual_is_there_and_what_multiplies_it() -> None:
    store, standby = Store(), Standby()
    store.add_keys(SHAPES)
    values = np.arange(1000, dtype=np.float32)
    store.keys[KEY].restore(2000, values, 0.25)
    standby.hear(store.keys[KEY].restored(2000, 1000))
    same(store, standby.taken_over())
    residuals = standby.taken_over().keys[KEY].residuals()
    assert residuals is not None and residuals[0][2000:3000].tobytes() == values.tobytes()


@pytest.mark.parametrize("told", ["at once", "later"])
def test_keys_that_were_removed_are_removed(told: str) -> None:
    store, standby = Store(), Standby()
    store.add_keys(SHAPES)
    standby.hear(store.keys[KEY].written(commit(store, KEY, 1, 0, True)))
    store.remove_keys([KEY])
    if told == "later":  # the connection broke before
        standby.reconnected()
    for of_key in [KEY] if told == "at once" else store.known:
        standby.hear(store.written(of_key))
    taken = standby.taken_over()
    assert taken.keys[KEY].removed and not taken.keys[OTHER].removed


def test_a_standbys_process_that_follows_another_goes_on_with_its_memory() -> None:
    store, standby = Store(), Standby()
    store.add_keys(SHAPES)
    standby.hear(store.keys[KEY].written(commit(store, KEY, 1, 0, True)))
    standby.mirror = Mirror(standby.mirror.segments)
    standby.reconnected()
    standby.hear(store.keys[KEY].written(commit(store, KEY, 2, 1, True)))
    same(store, standby.taken_over())


@pytest.mark.parametrize("rule", RULES)
def test_weights_go_on_at_the_standby_as_at_the_server(rule: str) -> None:
    spec = Declaration("w", "weights", (TensorSpec("x", (NUMEL,), "float32"),), "none", False, rule=rule)
    layout = build_layout(spec, layout_id=1, servers=1, workers=2)
    ((bucket, part),) = list(layout.parts())
    pair, parsed = layout.scheme(bucket).rounds(part.numel)[0].pair, UpdateRule.parse(rule)
    store, standby = Store(), Standby()
    store.add_weights(KEY, parsed, pair, NUMEL, 2)
    weights, rng = store.weights[KEY], np.random.default_rng(0)

    def update(of: Any, version: int, payload: Any) -> VersionCommit:
        slot = (version - 1) % 2
        of.prepare(slot)
        current = NO_SLOT if version == 1 else version % 2
        nbytes = of.update(Fold(KEY, version, (payload,), True, True, slot, current), [(0, NUMEL)])
        made = VersionCommit(KEY, version, slot, 1, nbytes, False, ((0, version),))
        of.commit(made)
        return made

    for version in range(1, 8):
        payload = rng.standard_normal(NUMEL, np.float32).view(np.uint8)
        standby.hear(weights.written(update(weights, version, payload)))
        answered = AnswerCommit(KEY, 0, version, version, (version - 1) % 2, 1)
        weights.commit(answered)
        standby.hear(weights.written(answered))
        taken = Store(standby.mirror.segments)
        taken.add_weights(KEY, parsed, pair, NUMEL, 2)
        assert taken.weights[KEY].kept == weights.kept
        assert taken.place(KEY, (version - 1) % 2).bytes.tobytes() == store.place(KEY, (version - 1) % 2).bytes.tobytes()
    payload = rng.standard_normal(NUMEL, np.float32).view(np.uint8)
    for of in (weights, taken.weights[KEY]):
        update(of, 8, payload)
    assert taken.place(KEY, 1).bytes.tobytes() == store.place(KEY, 1).bytes.tobytes(), "what the rule keeps is there, too"
    whole = Standby()
    for key in store.known:
        whole.hear(store.written(key))
    following = Store(whole.mirror.segments)
    following.add_weights(KEY, parsed, pair, NUMEL, 2)
    assert following.weights[KEY].kept == weights.kept


def test_bytes_are_received_where_they_stay_and_large_ones_in_pieces() -> None:
    store, mirror = Store(), Mirror()
    numel = PIECE_BYTES // 4 + 10
    store.add_keys([KeyShape(KEY, 64, numel)])
    residuals = store.keys[KEY].residuals()
    assert residuals is not None
    residuals[1][:] = np.arange(numel, dtype=np.float32)
    made = Commit(KEY, Result(1, 0, 2, NO_SLOT, 0), True)
    store.keys[KEY].commit(made)
    sizes = []
    for header, data in messages(store.keys[KEY].written(made), set()):
        room = mirror.room(header)
        if room is not None:
            sizes.append(len(room))
            room[:] = data
        mirror.take(header, data.copy() if room is None else room)
    assert sizes == [PIECE_BYTES, 40]
    copy = Store(mirror.segments)
    copy.add_keys([KeyShape(KEY, 64, numel)])
    copied = copy.keys[KEY].residuals()
    assert copied is not None and copied[0].tobytes() == residuals[1].tobytes()


@pytest.mark.parametrize("change", [
    {"step": 1 << 20}, {"key": 9}, {"contributors": 7}, {"codec": 3}, {"kind": Kind.PUSH}, {"payload_bytes": 0},
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    store, standby = Store(), Standby()
    store.add_keys(SHAPES)
    made = commit(store, KEY, 1, 0, True)
    (label, name), *_, (record, data) = messages(store.keys[KEY].written(made), set())
    standby.mirror.take(label, name.copy())
    with pytest.raises(RemoteProtocolError):
        standby.mirror.take(record._replace(**change), data[: 0 if "payload_bytes" in change else None])
    with pytest.raises(RemoteProtocolError):
        standby.mirror.take(label._replace(key=5), name.copy())
    assert standby.mirror.room(Header(Kind.REPLICA, key=KEY, codec=1, contributors=What.BYTES, step=1 << 20, payload_bytes=8)) is None
