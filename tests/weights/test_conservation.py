"""Compressed changes lose nothing: what servers hold, plus what workers' residuals keep, is the initial values plus all changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.layout.update_rule import UpdateRule
from psgc.server.blocks import Blocks
from psgc.server.step import NO_SLOT, Fold
from psgc.server.weights.versions import Versions
from psgc.transport.memory.arena import Arena
from psgc.wire.frames import Flag
from tests.worker.served_bucket import ServedBucket

NUMEL = 5001


@dataclass
class Buffer:
    array: Any
    waits: bool = False

    def load(self) -> Any:
        return self.array

    def store(self, skipped: bool) -> None:
        """It is where it should be."""


@pytest.mark.parametrize("codec", ["none", "onebit/none", "topk:k=0.01/none", "int8/none", "randomk:k=0.05/none"])
def test_held_plus_residuals_is_initial_plus_all_changes(codec: str) -> None:
    declaration = Declaration(
        "weights.w", "weights", (TensorSpec("w", (NUMEL,), "float32"),), codec, False, min_compress_bytes=0, rule="add"
    )
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2)
    (bucket,) = layout.buckets
    (part,) = bucket.parts
    arena = Arena("test-weights")
    works = [ServedBucket(layout, bucket, rank, arena) for rank in range(2)]
    buffers = [Buffer(np.zeros(NUMEL, np.float32)) for _ in works]
    held = Versions(part.key, UpdateRule(), layout.scheme(bucket).rounds(NUMEL)[0].pair, NUMEL, 2, Blocks("test-held"))
    rng = np.random.default_rng(5)
    initial = rng.normal(size=NUMEL).astype(np.float32)
    wanted, current, step = initial.astype(np.float64), NO_SLOT, 0

    def exchange(rank: int, push: bool) -> None:
        nonlocal current, step
        works[rank].begin(buffers[rank], skip=not push)
        if push:
            payload = works[rank].payload(part, works[rank].encode(part).payload_bytes)
            step += 1
            slot = 1 - max(current, 0)
            held.prepare(slot)
            held.update(Fold(part.key, step, (payload,), True, True, slot, current), [(0, NUMEL)])
            current = slot
        works[rank].decode(part, Flag.NONE, held.place(current).bytes)
        works[rank].store()

    buffers[0].array[:] = initial
    exchange(0, True)
    exchange(1, False)
    assert np.array_equal(buffers[0].array, initial) and np.array_equal(buffers[1].array, initial), "initial values travel uncompressed"
    for _ in range(12):
        rank = int(rng.integers(2))
        change = rng.normal(size=NUMEL).astype(np.float32)
        buffers[rank].array[:] = change
        wanted += change
        exchange(rank, True)
    kept = sum(memory.residual for work in works for memory in work.kept.remembered().values() if memory.residual is not None)
    assert np.allclose(held.place(current).bytes.view(np.float32) + kept, wanted, atol=1e-4)
    arena.close()
