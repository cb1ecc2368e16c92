"""Both ends of a payload connection prove themselves, and whoever lacks the key, or has that of another rank, proves nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.transport.security.handshake import ANSWER, CHALLENGE, ENCRYPTED, WELCOME, Refused, ServerProof, WorkerProof, worker_key

DATA_KEY = bytes(range(32))
WORKERS, EPOCH = 3, 1


def key_of(rank: int, epoch: int = EPOCH) -> bytes:
    return worker_key(DATA_KEY, rank, epoch)


def server(nonce: bytes = b"s" * 32, **changes: Any) -> ServerProof:
    fields = {"transport": "tcp", "server": 0, "epoch": EPOCH, "workers": WORKERS, "key_of": key_of, "nonce": nonce, **changes}
    return ServerProof(**fields)


def worker(nonce: bytes = b"w" * 32, **changes: Any) -> WorkerProof:
    fields = {"transport": "tcp", "server": 0, "epoch": EPOCH, "rank": 1, "key": key_of(1), "host": "boot/1", "nonce": nonce, **changes}
    return WorkerProof(**fields)


def shake(one: ServerProof, other: WorkerProof) -> None:
    """All of it; raises Refused at the end that refuses."""
    welcome = one.receive(other.receive(one.begin()))
    other.receive(welcome)


def test_both_ends_prove_themselves_and_have_the_same_keys_which_no_other_connection_has() -> None:
    one, other = server(), worker()
    shake(one, other)
    assert one.done and other.done
    assert one.rank == 1
    assert (one.wants, other.wants) == (0, 0)
    keys = {one.key_to_server, one.key_to_worker}
    assert (one.key_to_server, one.key_to_worker) == (other.key_to_server, other.key_to_worker)
    assert len(keys) == 2
    again = server(nonce=b"t" * 32)
    shake(again, worker())
    assert keys.isdisjoint({again.key_to_server, again.key_to_worker})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": bytes(32)}, "cannot prove it"),
        ({"key": key_of(2)}, "cannot prove it"),  # another rank's
        ({"rank": 2}, "cannot prove it"),
        ({"rank": 3, "key": key_of(3)}, "rank 3, but there are 3"),
        ({"epoch": 2, "key": key_of(1, 2)}, "epoch 2, now it is 1"),
        ({"key": key_of(1, 2)}, "cannot prove it"),  # of an epoch that is not now
        ({"server": 1}, "cannot prove it"),  # meant for another server
        ({"transport": "unix"}, "cannot prove it"),
    ],
)
def test_a_worker_without_the_ranks_own_key_for_this_server_and_epoch_is_refused(changes: dict[str, Any], said: str) -> None:
    one, other = server(), worker(**changes)
    with pytest.raises(Refused, match=said):
        one.receive(other.receive(one.begin()))
    assert not one.done
    assert one.rank == -1


def test_an_answer_heard_on_one_connection_opens_no_other() -> None:
    heard = worker().receive(server().begin())
    with pytest.raises(Refused, match="cannot prove it"):
        server(nonce=b"t" * 32).receive(heard)


def test_a_servers_own_words_sent_back_to_it_prove_nothing() -> None:
    one = server()
    with pytest.raises(Refused, match="not psgc"):
        one.receive(one.begin())


def test_a_false_server_is_refused_by_the_worker() -> None:
    other = worker()
    other.receive(server().begin())
    with pytest.raises(Refused, match="cannot prove that it is this job's server"):
        other.receive(WELCOME.pack(b"PSGs", 1, 0, 0, bytes(32)))
    impostor, victim = server(key_of=lambda _: bytes(32)), worker()
    with pytest.raises(Refused):
        shake(impostor, victim)
    assert not victim.done


def test_one_end_that_encrypts_and_one_that_does_not_part_with_a_reason() -> None:
    for one, other in ((server(encrypt=True), worker()), (server(), worker(encrypt=True))):
        with pytest.raises(Refused, match="PSGC_ENCRYPT"):
            other.receive(one.begin())
    answer = bytearray(worker().receive(server().begin()))
    answer[5] = ENCRYPTED
    with pytest.raises(Refused, match="PSGC_ENCRYPT"):
        server().receive(bytes(answer))


@given(st.data())
def test_a_message_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    one, other = server(), worker()
    messages = [one.begin()]
    messages.append(other.receive(messages[0]))
    messages.append(one.receive(messages[1]))
    which = data.draw(st.sampled_from([1, 2]))
    spoilt = bytearray(messages[which])
    place = data.draw(st.integers(0, len(spoilt) - 1).filter(lambda at: at not in (6, 7)))  # the pad means nothing
    spoilt[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused):
        (server() if which == 1 else other).receive(bytes(spoilt))


@given(st.binary(min_size=1, max_size=ANSWER.size))
def test_any_bytes_are_refused_or_not_enough(data: bytes) -> None:
    one = server()
    with contextlib.suppress(Refused):
        assert one.receive(data) == b""
        assert one.wants == ANSWER.size - len(data) > 0
    assert not one.done


@given(st.lists(st.integers(1, 50)))
def test_a_handshake_cut_into_any_pieces_is_the_same(cuts: list[int]) -> None:
    one, other = server(), worker()
    ends = [one, other]
    message, hearer = one.begin(), 1
    while message:
        reply = b""
        while message:
            size = min(cuts.pop() if cuts else 7, ends[hearer].wants)
            reply = ends[hearer].receive(message[:size])
            message = message[size:]
        message, hearer = reply, 1 - hearer
    assert one.done and other.done


def test_no_message_is_longer_than_what_is_read_of_a_stranger() -> None:
    assert max(CHALLENGE.size, ANSWER.size, WELCOME.size) <= 4096
