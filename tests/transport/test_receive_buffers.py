"""Memory that payloads are received into is used again, and never while anything refers to the payload."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
import pytest

from psgc.transport.receive_buffers import SMALLEST_BYTES, ReceiveBuffers

LARGE = 5 * SMALLEST_BYTES // 2


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_next_payload_of_about_the_same_size_is_received_where_the_last_one_lay() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(LARGE)
    assert first.size == LARGE
    assert first.flags.writeable
    where = address(first)
    del first
    second = buffers.take(LARGE + 1000)
    assert address(second) == where
    assert second.size == LARGE + 1000


@pytest.mark.parametrize(
    "kept", [lambda a: a[:100], lambda a: a.view(np.float32), lambda a: a[8:].view(np.int64)[::2], lambda a: a.data[4:8], np.asarray]
)
def test_memory_is_not_lent_again_while_anything_refers_to_the_payload(kept) -> None:  # type: ignore[no-untyped-def]
    buffers = ReceiveBuffers()
    first = buffers.take(4 * LARGE)
    where, view = address(first), kept(first)
    del first
    gc.collect()
    others = [buffers.take(4 * LARGE) for _ in range(3)]
    assert where not in [address(other) for other in others]
    del view
    assert address(buffers.take(4 * LARGE)) == where


def test_a_tensor_that_was_made_of_a_payload_keeps_it() -> None:
    torch = pytest.importorskip("torch")
    buffers = ReceiveBuffers()
    payload = buffers.take(4 * LARGE)
    where, tensor = address(payload), torch.from_numpy(payload)[16:].view(torch.float32)
    del payload
    assert address(buffers.take(4 * LARGE)) != where
    del tensor


def test_any_thread_may_drop_the_last_reference() -> None:
    buffers = ReceiveBuffers()
    payloads = [buffers.take(LARGE)]
    where = address(payloads[0])
    thread = threading.Thread(target=payloads.clear)
    thread.start()
    thread.join()
    assert address(buffers.take(LARGE)) == where


def test_idle_memory_has_a_limit_for_each_size() -> None:
    size = 4 * SMALLEST_BYTES  # the power of two above ``LARGE``
    buffers = ReceiveBuffers(most_idle_bytes=3 * size)
    tracemalloc.start()
    try:
        payloads = [buffers.take(LARGE) for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] >= 10 * size
        del payloads
        assert 3 * size <= tracemalloc.get_traced_memory()[0] < 4 * size
        too_large = buffers.take(16 * SMALLEST_BYTES)
        assert too_large.size == 16 * SMALLEST_BYTES
        del too_large
        assert tracemalloc.get_traced_memory()[0] < 4 * size
    finally:
        tracemalloc.stop()


def test_small_payloads_come_from_the_allocator() -> None:
    assert ReceiveBuffers().take(SMALLEST_BYTES - 1).base is None
    assert ReceiveBuffers().take(0).size == 0
