"""A server's memory outlives it: the launcher holds what a killed server had committed."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

import pytest

from psgc.launch.supervision.keeper import Keeper
from psgc.server.step import Commit, Result
from psgc.server.store import LABEL_BYTES, RECORD_BYTES, KeyShape, KeyStore, Store, find_blocks, read_record
from psgc.transport.memory.keeper_wire import send_segment
from psgc.transport.memory.segment import Segment
from psgc.wire.frames import Flag

SERVER = """
import os, signal, socket
from psgc.server.step import Commit, Result
from psgc.server.store import KeyShape, Store
from psgc.transport.memory.keeper_wire import send_segment
from psgc.wire.frames import Flag
store = Store()
((number, segment),) = store.add_keys([KeyShape(4, 100, 0), KeyShape(5, 8, 4)])
store.add_keys([KeyShape(6, 8, 0)])
send_segment(socket.socket(fileno=int(os.environ["PSGC_KEEPER_FD"])), f"store-{number}", segment.fd, segment.nbytes)
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
    segment = Segment.attach(os.dup(fd), nbytes)
    blocks = dict(find_blocks(segment.bytes))
    assert list(blocks) == [KeyShape(4, 100, 0), KeyShape(5, 8, 4), KeyShape(6, 8, 0)], "the memory alone says what is in it"
    records = [read_record(block[LABEL_BYTES:][:RECORD_BYTES]) for block in blocks.values()]
    assert records == [None, (Result(7, Flag.NONE, 2, 1, 8), 1), None]
    assert b"answered" in blocks[KeyShape(5, 8, 4)].tobytes()
    keeper.close()


def test_a_record_torn_by_a_crash_is_not_believed() -> None:
    store = Store()
    ((_, segment),) = store.add_keys([KeyShape(5, 8, 0)])
    key = store.keys[5]
    assert key.recorded() is None, "nothing was committed yet"
    key.commit(Commit(5, Result(1, Flag.NONE, 1, 0, 8), False))
    assert key.recorded() == (Result(1, Flag.NONE, 1, 0, 8), 0)
    segment.bytes[LABEL_BYTES] += 1  # the writer died after the first word
    assert key.recorded() is None
    store.close()


def test_a_key_that_was_removed_has_no_result_and_those_behind_it_are_still_found() -> None:
    store = Store()
    shapes = [KeyShape(5, 1 << 20, 0), KeyShape(6, 8, 0)]
    ((_, segment),) = store.add_keys(shapes)
    for key in (5, 6):
        store.keys[key].result(0)[:8] = list(b"answered")
        store.keys[key].commit(Commit(key, Result(1, Flag.NONE, 1, 0, 8), False))
    store.remove_keys([5])
    blocks = dict(find_blocks(segment.bytes))
    assert list(blocks) == shapes
    records = [read_record(block[LABEL_BYTES:][:RECORD_BYTES]) for block in blocks.values()]
    assert records == [None, (Result(1, Flag.NONE, 1, 0, 8), 0)]
    store.close()


def test_a_segment_is_read_up_to_the_first_key_that_has_no_label_or_does_not_fit() -> None:
    store = Store()
    ((_, segment),) = store.add_keys([KeyShape(5, 8, 0), KeyShape(6, 8, 0)])
    assert [shape.key for shape, _ in find_blocks(segment.bytes)] == [5, 6]
    label = KeyStore.bytes_needed(KeyShape(5, 8, 0))
    assert [shape.key for shape, _ in find_blocks(segment.bytes[: label + LABEL_BYTES])] == [5]
    segment.bytes[label + 31] = 0  # the writer died in the middle of the label
    assert [shape.key for shape, _ in find_blocks(segment.bytes)] == [5]
    segment.bytes[8:16] = 255  # whatever it says, it is read within the segment
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
        assert key.recorded() is None or key.recorded()[1] != (0 if new is key._residuals[0] else 1)  # type: ignore[index]
        key.commit(Commit(5, Result(step, Flag.NONE, 1, slot, 4), True))
        now = key.residuals()
        assert now is not None
        assert (now[0] == step).all()
    assert KeyStore.bytes_needed(KeyShape(5, 4, 4)) % 64 == 0
    store.close()


def test_a_segment_of_the_same_name_replaces_the_old_one_and_is_handed_over() -> None:
    keeper = Keeper()
    with socket.socket(fileno=os.dup(keeper.child_fd)) as server:
        for text in (b"old", b"new"):
            segment = Segment.create("layout", 4096)
            segment.bytes[:3] = list(text)
            send_segment(server, "layout", segment.fd, segment.nbytes)
            segment.close()
        first = len(os.listdir("/proc/self/fd"))
        assert keeper.receive()
        assert len(os.listdir("/proc/self/fd")) == first + 1, "the old descriptor is closed"
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
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(server, [packet], [segment.fd])
        assert keeper.receive()
        assert len(os.listdir("/proc/self/fd")) == before, "nor does its descriptor stay"
        server.send(b'{"name": "x", "bytes": 4096}')
        send_segment(server, "layout", segment.fd, segment.nbytes)
        assert keeper.receive()
        assert list(keeper.segments) == ["layout"]
        segment.close()
    keeper.close()
