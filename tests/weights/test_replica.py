"""A server's end of the connection to its standby: what is sent on it and when, and that one which breaks again and again is named, and ends the job."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from psgc.config import Config
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.processes.mailbox import Mailbox
from psgc.server import replica as replicas
from psgc.server.replica import GO_ON, Replica, What
from psgc.server.serving import Serving
from psgc.server.state import Send, ServerState
from psgc.server.step import NO_SLOT, Commit, Result
from psgc.server.store import KeyShape, Store
from psgc.transport.link_set import LinkSet
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import Topology

LIMIT_S, SILENCE_S = 600.0, 5.0


class Link:
    """In place of the connection."""

    route = SimpleNamespace(address="tcp://10.0.0.9:7")
    remedy = "Connection reset by peer"

    def __init__(self) -> None:
        self.sent: list[Header] = []
        self.heard: list[int] = []  # marks that are acknowledged
        self.happened: list[str] = []
        self.kept = 0  # bytes of its own memory since the last mark

    def events(self) -> list[str]:
        happened, self.happened = self.happened, []
        return happened

    def receive(self) -> Iterator[tuple[Header, Any]]:
        heard, self.heard = self.heard, []
        yield from ((Header(Kind.ACK, job=5, epoch=1, step=mark), None) for mark in heard)

    def send(self, header: Header, body: bytes = b"", place: Any = None) -> None:
        self.sent.append(header)

    def take(self) -> tuple[list[int], int | None]:
        """What was sent since the last call: keys whose records were, and the mark behind that."""
        sent, self.sent = self.sent, []
        marks = [header.step for header in sent if header.contributors == What.MARK]
        assert len(marks) <= 1
        return [header.key for header in sent if header.contributors == What.RECORD], marks[0] if marks else None


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link()
    monkeypatch.setattr(replicas, "connect_server", lambda *_, **__: made)
    return made


def replica_of(store: Store) -> Replica:
    topology = Topology(0, 2, 2, (1, 1), 1, (), (), "00" * 32, standby="tcp://10.0.0.9:7")
    return Replica(Config(job=5, heartbeat_s=4.0), topology, None, store, 0.0)  # type: ignore[arg-type]


def stored(keys: int) -> Store:
    """A server's memory, of which each key has a step."""
    store = Store()
    store.add_keys(KeyShape(key, 64, 0) for key in range(keys))
    for key in range(keys):
        store.keys[key].commit(Commit(key, Result(1, 0, 2, 0, 64), False))
    return store


def again(store: Store, replica: Replica, key: int) -> None:
    made = Commit(key, Result(2, Flag.SKIPPED, 0, NO_SLOT), False)
    store.keys[key].commit(made)
    replica.committed(key, store.keys[key].written(made))


def test_what_is_kept_is_sent_no_more_at_once_than_may_wait_and_what_is_committed_meanwhile_joins_it(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "FED_BYTES", 1500)  # of a key: two messages of 256 bytes and one more, and 128 bytes in them
    store = stored(5)
    replica = replica_of(store)
    link.happened = ["up"]
    replica.look(0.0)
    assert link.take() == ([0, 1], GO_ON)
    again(store, replica, 1)
    assert link.take() == ([], None), "it comes once more, behind the others"
    for keys, mark in (([2, 3], GO_ON), ([4, 1], 1)):
        link.heard = [GO_ON]
        assert replica.receive(1.0) == []
        assert link.take() == (keys, mark)
    again(store, replica, 2)
    assert link.take() == ([2], 2)


def test_what_was_sent_on_a_connection_that_broke_is_sent_on_the_next_one_and_removed_keys_are_told(link: Link) -> None:
    store = stored(3)
    replica = replica_of(store)
    link.happened = ["up"]
    replica.look(0.0)
    assert link.take() == ([0, 1, 2], 1)
    store.remove_keys([1])
    link.happened = ["down", "up"]
    replica.look(1.0)
    assert link.take() == ([1, 0, 2], 2)


def breaking(link: Link, answers: list[int]) -> list[tuple[float, str, bool]]:
    """All lines while the connection is made again at once, and breaks every 4 seconds; answers: marks that are acknowledged on each of them, of which the last
    stands for the mark behind everything."""
    replica, said = replica_of(stored(3)), list[tuple[float, str, bool]]()
    now = 0.0
    link.happened = ["up"]
    while now < 5 * LIMIT_S:
        replica.look(now)
        _, mark = link.take()
        assert mark is not None
        link.heard = [GO_ON if answer == GO_ON else mark for answer in answers]
        replica.receive(now + 1.0)
        link.sent.clear()
        text, over = replica.late(now + 1.0, SILENCE_S, LIMIT_S)
        said += [(now, text, over)] if text else []
        if over:
            break
        now += 4.0
        link.happened = ["down", "up"]
    return said


@pytest.mark.parametrize("answers", [[], [GO_ON]])
def test_a_connection_that_breaks_again_and_again_is_named_and_ends_the_job(
    link: Link, answers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "FED_BYTES", 1)  # a key, and then the next one is asked for
    said = breaking(link, answers)
    first, _, over = said[0]
    assert first <= 4.0 + SILENCE_S + 4.0 and not over
    assert len(said) < 20, "named ever more rarely"
    when, text, over = said[-1]
    assert over
    assert LIMIT_S < when <= LIMIT_S + 12
    assert text == (
        "server 0: the connection to its standby at tcp://10.0.0.9:7 broke 151 times in 601 s and nothing came through: Connection reset by peer; "
        "gave up (PSGC_STEP_TIMEOUT_S)"
    )


def test_a_connection_that_breaks_again_and_again_and_brings_all_each_time_goes_on(link: Link) -> None:
    assert breaking(link, [1]) == []


def test_one_that_is_down_is_named_and_ends_the_job(link: Link) -> None:
    replica = replica_of(stored(1))
    link.happened = ["up", "down"]
    replica.look(0.0)
    assert replica.late(SILENCE_S + 1, SILENCE_S, LIMIT_S) == (
        "its standby cannot be reached at tcp://10.0.0.9:7, for 6 s so far: Connection reset by peer", False
    )  # fmt: skip
    assert [now for now in range(int(SILENCE_S) + 2, int(LIMIT_S) + 2) if replica.late(now, SILENCE_S, LIMIT_S)[1]] == [LIMIT_S + 1]


@pytest.mark.parametrize("breaks", [1, 4])
def test_a_standby_is_given_as_long_as_the_server_ran(link: Link, breaks: int) -> None:
    replica, absent = replica_of(stored(1)), 10_000.0
    link.happened = ["up", "down"] * breaks
    replica.look(0.0)
    assert replica.late(1.0, SILENCE_S, LIMIT_S) == ("", False)
    assert replica.late(1.0 + absent, SILENCE_S, LIMIT_S) == ("", False)
    over = [now for now in range(2, 2 * int(LIMIT_S)) if replica.late(now + absent, SILENCE_S, LIMIT_S)[1]]
    assert LIMIT_S <= over[0] <= LIMIT_S + 2


def test_a_process_that_follows_another_sends_what_that_one_has_committed_before_it_says_anything_of_it(link: Link) -> None:
    declaration = Declaration("x", "adhoc", (TensorSpec("x", (100,), "float32"),), "none", False)
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2)
    former = Store()
    serving = serving_of(former)
    assert serving.add_layout(layout, False)
    (key,) = former.keys
    former.keys[key].commit(Commit(key, Result(1, 0, 2, 0, 400), False))

    store = Store([segment for _, segment in sorted(former.segments.items())])
    serving = serving_of(store)
    serving.replica = replica = replica_of(store)
    link.happened = ["up"]
    replica.look(0.0)
    assert link.take() == ([], 1), "nothing is taken up yet"
    link.heard = [1]
    serving.hear_standby(replica)
    assert serving.add_layout(layout, True)
    assert link.take() == ([key], 2)
    pull = Header(Kind.PULL, job=5, epoch=1, plan=1, key=key, step=1, sender=0)
    assert serving.state is not None
    serving.state.joined("peer", 0)
    (answer,) = [effect for effect in serving.state.receive("peer", pull, None, 0.0) if isinstance(effect, Send)]
    assert answer.header.kind == Kind.RESULT
    assert replica.held.holds(answer)
    link.heard = [2]
    assert answer in replica.receive(1.0)


def serving_of(store: Store) -> Serving:
    serving = Serving(Config(job=5), store, LinkSet(), Mailbox(), None, lambda fault: pytest.fail(fault.text), lambda: None)
    serving.state = ServerState(0, 2, 5, 1)
    return serving
