"""One process's shared memory: pieces lie apart, descriptors are few, and memory is taken only where it is used."""

from __future__ import annotations

import gc
import os
import random
import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from psgc.transport.memory.arena import FIRST_BYTES, Arena
from psgc.transport.memory.mapping import map_shared, populate
from psgc.transport.memory.segment import Segment
from psgc.transport.security.handshake import WorkerProof
from psgc.transport.shm import LocalLink
from psgc.wire.frames import Header, Kind


def descriptors(name: str) -> int:
    """This process's descriptors of the shared memory of this name."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += os.readlink(entry).startswith(f"/memfd:{name}-")
    return count


def resident_kb(name: str) -> int:
    """Memory that this process has touched in its mappings of the shared memory of this name."""
    total, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            wanted = f"/memfd:{name}-" in line
        elif wanted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_row_lies_in_one_segment_without_gaps_behind_whole_cache_lines() -> None:
    arena = Arena("test")
    arena.cut(FIRST_BYTES - 100)
    row = arena.cut_row([4096, 64, 100, 1])
    assert len({piece.segment for piece in row}) == 1, "although the first one's rest had room for one of them"
    assert [piece.offset - row[0].offset for piece in row] == [0, 4096, 4160, 4288]
    assert arena.cut(1).offset == row[0].offset + 4352
    arena.close()


def test_pieces_are_zero_lie_apart_and_stay_as_they_are_written() -> None:
    arena, draw = Arena("test"), random.Random(0)
    sizes = [draw.choice((0, 1, 63, 64, 65, 4096, 100_000, 3 << 20)) for _ in range(400)]
    pieces = [arena.cut(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert not piece.bytes.any()
        assert piece.offset % 64 == 0
        piece.bytes[:] = number % 251 + 1
    for number, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        assert piece.bytes.size == size
        assert (piece.bytes == number % 251 + 1).all()
        assert np.shares_memory(piece.bytes, piece.segment.view(piece.offset, size)) or not size
    arena.close()


def test_descriptors_are_as_many_as_doublings_whatever_is_asked_for() -> None:
    draw, arena = random.Random(1), Arena("test-doublings")
    for _ in range(20_000):
        arena.cut(draw.choice((80, 5000, 300_000)))
    asked = sum(segment.nbytes for segment in arena.segments.values())
    assert len(arena.segments) == descriptors("test-doublings") < 14
    assert [arena.segments[n].nbytes for n in range(3)] == [FIRST_BYTES, 2 * FIRST_BYTES, 4 * FIRST_BYTES]
    assert asked > 1 << 30, "more than this test has touched"
    arena.close()
    assert descriptors("test-doublings") == 0


def test_one_piece_may_be_larger_than_any_segment_so_far() -> None:
    arena = Arena("test")
    small, large, after = arena.cut(10), arena.cut(50 * FIRST_BYTES + 1), arena.cut(10)
    assert [place.segment for place in (small, large, after)] == [arena.segments[number] for number in (0, 1, 1)]
    large.bytes[-1] = 7
    after.bytes[:] = 8
    assert large.bytes[-1] == 7
    arena.close()


def test_memory_is_taken_where_it_is_used() -> None:
    arena = Arena("test-used")
    piece = arena.cut(64 << 20)
    arena.cut(1)
    assert resident_kb("test-used") == 0
    piece.populate()
    assert 64 << 10 <= resident_kb("test-used") < 66 << 10
    assert not piece.bytes.any()
    arena.close()


def test_a_piece_that_is_populated_again_keeps_what_was_written_and_so_do_its_neighbours() -> None:
    arena = Arena("test")
    left, piece, right = arena.cut(1000), arena.cut(100_000), arena.cut(1000)
    for number, each in enumerate((left, piece, right)):
        each.bytes[:] = number + 1
        piece.populate()
    assert [set(each.bytes.tolist()) for each in (left, piece, right)] == [{1}, {2}, {3}]
    arena.close()


def test_a_mapping_lives_as_long_as_an_array_over_it_and_no_longer() -> None:
    segment = Segment.create("test-lives", 4 << 20)
    view = segment.view(5, 10)
    segment.close()
    del segment
    gc.collect()
    view[:] = 3
    assert view.sum() == 30
    assert "test-lives" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "test-lives" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_said() -> None:
    with pytest.raises(OSError, match="cannot map 4096 bytes of shared memory: Bad file descriptor"):
        map_shared(-1, 4096)


def test_a_peer_holds_no_descriptor_of_what_it_was_passed() -> None:
    proof = WorkerProof("unix", 0, 1, 0, bytes(32), "h", bytes(32))
    ours, theirs = (LocalLink(end, proof, "peer") for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    arena = Arena("test-passed")
    piece = arena.cut(5)
    piece.bytes[:] = list(b"hello")
    ours.send(Header(Kind.PUSH, payload_bytes=5), place=piece)
    ours.flush()
    assert [bytes(payload) for _, payload in theirs.receive()] == [b"hello"]
    assert descriptors("test-passed") == 1, "the owner's"
    for end in (ours, theirs):
        end.close()
    arena.close()


def test_other_threads_run_while_memory_is_made() -> None:
    """Single-handed they would make no turn: the interval after which Python takes the GIL from a thread that holds it is an hour here."""
    turns, stop, started = [0], threading.Event(), threading.Event()

    def count() -> None:
        started.set()
        while not stop.is_set():
            turns[0] += 1
            stop.wait(1e-4)  # lets the GIL go

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    during = tries = 0
    try:
        thread.start()
        started.wait()
        arena = Arena("test")
        piece = arena.cut(64 << 20)
        while not during and tries < 200:  # a busy machine may give the thread no core in one of them
            tries += 1
            before = turns[0]
            populate(piece.bytes)
            during = turns[0] - before
            piece.release()
        arena.close()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert during > 0


def test_memory_that_is_released_goes_back_for_every_process_that_maps_it_and_its_neighbours_keep_theirs() -> None:
    arena = Arena("test")
    before, piece, after = (arena.cut(size) for size in (5000, 3 << 20, 5000))
    segment = piece.segment
    peer = Segment.attach(os.dup(segment.fd), segment.nbytes)
    for each in (before, piece, after):
        each.bytes[:] = 7
    held = os.stat(f"/proc/self/fd/{segment.fd}").st_blocks
    piece.release()
    freed = 512 * (held - os.stat(f"/proc/self/fd/{segment.fd}").st_blocks)
    assert (3 << 20) - 2 * 4096 <= freed <= 3 << 20
    assert (before.bytes == 7).all() and (after.bytes == 7).all()
    assert np.count_nonzero(peer.view(piece.offset, 3 << 20)) < 2 * 4096
    piece.bytes[:] = 9
    assert (peer.view(piece.offset, 3 << 20) == 9).all(), "it can be used again"
    arena.close()
