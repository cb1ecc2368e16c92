"""A server's memory outlives it: the launcher holds what a killed server had committed."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

import pytest

from psgc.errors import PsgcError
from psgc.launch.supervision.keeper import Keeper
from psgc.server.blocks import LABEL, LABEL_BYTES, find_blocks
from psgc.server.step import NO_SLOT, Commit, Kept, Result
from psgc.server.store import RECORD_BYTES, RECORDS_BYTES, KeyShape, KeyStore, Record, Store, read_record
from psgc.transport.memory.keeper_wire import Left, recv_left, send_forget, send_segment
from psgc.transport.memory.segment import Segment
from psgc.wire.frames import Flag
from tests.descriptors import descriptors_of

SERVER = """
import os, signal, socket
from psgc.server.step import Commit, Result
from psgc.server.store import KeyShape, Store
from psgc.transport.memory.keeper_wire import send_segment
from psgc.wire.frames import Flag
store = Store()
store.add_keys([KeyShape(4, 100, 0), KeyShape(5, 8, 4)])
store.add_keys([KeyShape(6, 8, 0)])
send_segment(socket.socket(fileno=int(os.environ["PSGC_KEEPER_FD"])), "store-0", store.segments[0].fd, store.segments[0].nbytes)
store.keys[5].result(1)[:] = list(b"answered")
store.keys[5].commit(Commit(5, Result(7, Flag.NONE, 2, 1, 8), True))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_server_committed_is_still_there() -> None:
    keeper = Keeper()
    env = {**os.environ, "PSGC_KEEPER_FD": str(keeper.child_fd)}
    popen = subprocess.Popen([sys.executable, "-c", SERVER], env=env, pass_fds=[keeper.child_fd])
    keeper.started()
    popen.wait(timeout=300)
    while keeper.receive():
        with selectors.DefaultSelector() as selector:
            selector.register(keeper.socket, selectors.EVENT_READ)
            selector.select(timeout=5)
    fd, nbytes = keeper.segments["store-0"]
    segment = Segment(os.dup(fd), nbytes)
    shapes = [KeyShape(found.id.key, *found.shape) for found in find_blocks(segment.bytes)]
    assert shapes == [KeyShape(4, 100, 0), KeyShape(5, 8, 4), KeyShape(6, 8, 0)], "the memory alone says what is in it"
    made: list[int] = []
    store = Store([segment], lambda number, _: made.append(number))
    store.add_keys(shapes)
    assert made == [], "no memory is made for what is there"
    assert [store.keys[key].kept for key in (4, 5, 6)] == [Kept(None), Kept(Result(7, Flag.NONE, 2, 1, 8), 1), Kept(None)]
    assert store.keys[5].result(1).tobytes() == b"answered"
    assert store.keys[5].residual_slot == 1
    store.add_keys([KeyShape(7, 8 << 20, 0)])
    assert made == [1], "further segments follow, and are kept before anything is in them"
    store.close()
    keeper.close()


@pytest.mark.parametrize("written", range(RECORD_BYTES + 1))
def test_wherever_the_process_ends_in_a_record_the_one_before_counts_or_the_whole_new_one(written: int) -> None:
    store = Store()
    store.add_keys([KeyShape(5, 8, 4)])
    segment = store.segments[0]
    key = store.keys[5]
    assert key.kept == Kept(None), "nothing was committed yet"
    results = Result(1, Flag.NONE, 1, 0, 8), Result(2, Flag.SKIPPED, 0), Result(3, Flag.NONE, 2, 1, 7)
    commits = [Commit(5, results[0], True), Commit(5, results[1], False, True, 0.5), Commit(5, results[2], True)]
    kept = [Kept(commits[0].result, 0), Kept(commits[1].result, 0, True, 0.5), Kept(commits[2].result, 1)]
    for commit, before, after in zip(commits, [Kept(None), *kept], kept, strict=False):
        records = segment.bytes[LABEL_BYTES:][:RECORDS_BYTES]
        old = records.copy()
        key.commit(commit)
        assert key.kept == after
        new = records.copy()
        (changed,) = {at // RECORD_BYTES for at in (old != new).nonzero()[0]}
        torn = old.copy()
        own = slice(changed * RECORD_BYTES, (changed + 1) * RECORD_BYTES)
        torn[own][-8:] = 0  # the order of writing: the last word is cleared, all before it is written, then itself
        torn[own][: min(written, RECORD_BYTES - 8)] = new[own][: min(written, RECORD_BYTES - 8)]
        if written > RECORD_BYTES - 8:
            torn[own][-8:written] = new[own][-8 : written or None] if written == RECORD_BYTES else 0
        found = read_record(torn)
        assert (Kept(None) if found is None else found.kept) == (after if written == RECORD_BYTES else before)
    store.close()


def test_the_last_word_of_a_record_is_what_makes_it_count() -> None:
    store = Store()
    store.add_keys([KeyShape(5, 8, 0)])
    segment = store.segments[0]
    store.keys[5].commit(Commit(5, Result(1, Flag.NONE, 1, 0, 8), False))
    records = segment.bytes[LABEL_BYTES:][:RECORDS_BYTES]
    assert read_record(records) == Record(1, Kept(Result(1, Flag.NONE, 1, 0, 8), 0), (8, 0))
    records[-1] += 1
    assert read_record(records) is None
    store.close()


def test_a_restored_residual_and_its_unit_outlive_the_process() -> None:
    store = Store()
    store.add_keys([KeyShape(5, 8, 4)])
    segment = store.segments[0]
    store.keys[5].restore(1, b"\0\0\x80\x3f" * 2, 0.25)
    again = Store([Segment(os.dup(segment.fd), segment.nbytes)])
    again.add_keys([KeyShape(5, 8, 4)])
    assert again.keys[5].kept == Kept(None, NO_SLOT, False, 0.25)
    residuals = again.keys[5].residuals()
    assert residuals is not None
    assert residuals[0].tolist() == [0, 1, 1, 0]
    store.close()
    again.close()


def test_a_key_of_another_shape_is_not_taken_up() -> None:
    store = Store()
    store.add_keys([KeyShape(5, 8, 4)])
    segment = store.segments[0]
    again = Store([Segment(os.dup(segment.fd), segment.nbytes)])
    with pytest.raises(PsgcError, match="former process"):
        again.add_keys([KeyShape(5, 8, 3)])
    store.close()
    again.close()


def test_a_key_that_was_removed_has_no_result_and_those_behind_it_are_still_found() -> None:
    store = Store()
    shapes = [KeyShape(5, 1 << 20, 0), KeyShape(6, 8, 0)]
    store.add_keys(shapes)
    segment = store.segments[0]
    for key in (5, 6):
        store.keys[key].result(0)[:8] = list(b"answered")
        store.keys[key].commit(Commit(key, Result(1, Flag.NONE, 1, 0, 8), False))
    store.remove_keys([5])
    again = Store([Segment(os.dup(segment.fd), segment.nbytes)])
    again.add_keys(shapes)
    assert [again.keys[key].removed for key in (5, 6)] == [True, False]
    assert again.keys[6].kept == Kept(Result(1, Flag.NONE, 1, 0, 8), 0)
    store.close()
    again.close()


def test_a_segment_is_read_up_to_the_first_key_that_has_no_label_or_does_not_fit() -> None:
    store = Store()
    store.add_keys([KeyShape(5, 8, 0), KeyShape(6, 8, 0)])
    segment = store.segments[0]
    assert [found.id.key for found in find_blocks(segment.bytes)] == [5, 6]
    label = LABEL_BYTES + KeyStore.bytes_needed(KeyShape(5, 8, 0))
    assert [found.id.key for found in find_blocks(segment.bytes[: label + LABEL_BYTES])] == [5]
    segment.bytes[label + LABEL.size - 1] = 0  # the writer died in the middle of the label
    assert [found.id.key for found in find_blocks(segment.bytes)] == [5]
    segment.bytes[32:40] = 255  # whatever it says, it is read within the segment
    assert list(find_blocks(segment.bytes)) == []
    store.close()


def test_a_step_never_writes_the_buffers_that_the_record_names() -> None:
    store = Store()
    store.add_keys([KeyShape(5, 4, 4)])
    key = store.keys[5]
    for step, slot in ((1, 1), (2, 0), (3, 1)):
        committed, new = key.residuals() or (None, None)
        assert committed is not None
        assert new is not None
        new[:] = step
        key.result(slot)[:] = step
        assert new is key._residuals[1 - key.residual_slot]
        key.commit(Commit(5, Result(step, Flag.NONE, 1, slot, 4), True))
        now = key.residuals()
        assert now is not None
        assert (now[0] == step).all()
    assert KeyStore.bytes_needed(KeyShape(5, 4, 4)) % 64 == 0
    store.close()


def test_a_segment_of_the_same_name_replaces_the_old_one_and_is_handed_over() -> None:
    keeper, old = Keeper(), -1
    with socket.socket(fileno=os.dup(keeper.child_fd)) as server:
        for text in (b"old", b"new"):
            segment = Segment.create("layout", 4096)
            segment.bytes[:3] = list(text)
            send_segment(server, "layout", segment.fd, segment.nbytes)
            old = os.dup(segment.fd) if text == b"old" else old
            segment.close()
        assert keeper.receive()
        assert descriptors_of(old) == 1, "the old descriptor is closed"
        os.close(old)
    [(name, (fd, _))] = keeper.segments.items()
    assert (name, os.pread(fd, 3, 0)) == ("layout", b"new")
    assert not os.get_inheritable(fd)
    keeper.close()


@pytest.mark.parametrize(
    "packet", [b"no json", b"[]", b'{"name": "x"}', b'{"name": "x", "bytes": 8192}', b'{"name": "x", "bytes": "many"}']
)
def test_a_packet_that_names_no_segment_is_dropped_and_the_next_is_kept(packet: bytes) -> None:
    keeper = Keeper()
    with socket.socket(fileno=os.dup(keeper.child_fd)) as server:
        segment = Segment.create("layout", 4096)
        before = descriptors_of(segment.fd)
        socket.send_fds(server, [packet], [segment.fd])
        assert keeper.receive()
        assert descriptors_of(segment.fd) == before, "nor does its descriptor stay"
        server.send(b'{"name": "x", "bytes": 4096}')
        send_segment(server, "layout", segment.fd, segment.nbytes)
        assert keeper.receive()
        assert list(keeper.segments) == ["layout"]
        segment.close()
    keeper.close()


def test_each_process_of_a_server_finds_what_the_ones_before_have_left_until_the_job_has_ended() -> None:
    keeper = Keeper()
    found: list[Left] = []
    for incarnation in (1, 2, 3):
        with socket.socket(fileno=os.dup(keeper.child_fd)) as server:
            keeper.started()
            found.append(recv_left(server))
            assert found[-1].incarnation == incarnation
            if incarnation == 1:
                assert not keeper.followable
                segment = Segment.create("store-0", 4096)
                send_segment(server, "store-0", segment.fd, segment.nbytes)
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    send_segment(server, "listener-tcp", listener.fileno(), 0)
                    port = listener.getsockname()[1]
            if incarnation == 3:
                send_forget(server)
        keeper.receive()
        assert keeper.followable == (incarnation < 3)
        keeper.renew()
    assert len({left.lineage for left in found}) == 1
    assert [list(left.kept) for left in found] == [[], *[["store-0", "listener-tcp"]] * 2]
    for left in found[1:]:
        with socket.socket(fileno=left.kept["listener-tcp"][0]) as same:
            assert same.getsockname()[1] == port
        os.close(left.kept["store-0"][0])
    segment.close()
    keeper.close()
