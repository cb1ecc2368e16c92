"""One bucket's steps on a recorded device, with a server that answers what it should: without a job around it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.codec import Stream
from psgc.codecs.scheme import PairScheme, Scheme, slices
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.torch.device import engines
from psgc.torch.device.engine import Engine
from psgc.torch.tensors.buffers import TensorsBuffer, Where, staging_dtype
from psgc.wire.frames import Flag
from tests.device.recording import RecordingRuntime
from tests.worker.served_bucket import ServedBucket

SLOT_BYTES = 4096  # so that payloads travel in pieces


def use_recorded(runtime: RecordingRuntime, slots: int = 2, slot_bytes: int = SLOT_BYTES) -> Engine:
    """From now on CPU tensors count as on this device. ``engines.use()`` ends it."""
    engine = Engine(runtime, slots, slot_bytes)
    engines.use(lambda tensor: True, lambda device: engine, lambda device: runtime.capturing)
    return engine


def one_bucket(codec: str, shapes: list[tuple[int, ...]], dtype: str = "float32", part_bytes: int = 1 << 16) -> Layout:
    specs = tuple(TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes))
    order = tuple(range(len(specs)))
    declaration = Declaration(
        "m", "plan", specs, codec, True, order=order, used=order, part_bytes=part_bytes, fuse_bytes=1 << 22, min_compress_bytes=0, seed=3
    )
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset(order))
    assert len(layout.buckets) == 1
    return layout


class Bucket:
    """A rank's bucket and the tensors in it. runtime: of the device that its tensors lie on; None: they lie on the CPU."""

    def __init__(self, layout: Layout, runtime: RecordingRuntime | None, where: Where = "", rank: int = 0) -> None:
        self.layout, self.runtime = layout, runtime
        bucket = layout.buckets[0]
        self.served = ServedBucket(layout, bucket, rank)
        self.work, self.kept = self.served.work, self.served.kept
        self.shapes = [spec.shape for spec in layout.tensors]
        self.buffer = TensorsBuffer(self.shapes, staging_dtype(bucket.codec, bucket.dtype), where, late=True)
        self.payloads: list[bytes] = []
        self._sent: dict[int, Any] = {}  # by key, this rank's last payloads

    def step(
        self, gradients: list[Any], dropped: bool = False, rescale: float = 1.0, skip: bool = False, answer: bytes | None = None
    ) -> list[torch.Tensor]:
        """gradients: tensors, or None where there is none. answer: NaN flagged if b"". Returns the results, by tensor."""
        work, runtime = self.work, self.runtime
        given = [None if g is None else g.clone() for g in gradients]
        likes = [torch.empty(shape, dtype=getattr(torch, self.layout.tensors[0].dtype)) for shape in self.shapes]
        if runtime is not None:
            runtime.trainer_writes([g for g in given if g is not None])
        self.buffer.bind(given, likes)
        self._together(lambda _: self.served.begin(self.buffer, dropped, rescale, skip), [None])
        found: dict[int, Any] = {}
        flagged = False
        if not skip:
            self.payloads = []
        for number in range(max((part.round for part in work.bucket.parts), default=0) + 1):
            parts = [part for part in work.bucket.parts if part.round == number]
            if not skip:
                self._together(lambda part: found.update({part.key: self.served.encode(part)}), parts)
                own = {part.key: self.served.payload(part, found[part.key].payload_bytes) for part in parts}
                self.payloads += [payload.tobytes() for payload in own.values()]
                self._sent |= {key: payload for key, payload in own.items() if len(payload)}
            flagged = flagged or any(encoded.nonfinite for encoded in found.values())
            self._together(lambda part, flagged=flagged: self._decode(part, flagged), parts)
        self.buffer.arrive()
        results = [made if g is None else g for g, made in zip(given, self.buffer.made, strict=True)]
        if runtime is not None:
            runtime.trainer_reads([r for r in results if r is not None])
        return [r.clone() for r in results if r is not None]

    def _together(self, job: Any, parts: Any) -> None:
        """Each part in a thread of its own, one after the other: as pool threads do, but in an order that is the same in each run."""
        for part in parts:
            errors: list[BaseException] = []

            def run(part: Any = part, errors: list[BaseException] = errors) -> None:
                try:
                    job(part)
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            if errors:
                raise errors[0]

    def _decode(self, part: Any, flagged: bool) -> None:
        flags = Flag.NONFINITE if flagged else Flag.NONE
        if type(self.served.scheme) is PairScheme:
            answer = served(self.layout, part, self.work.step)
        else:
            answer = summed(self.served.scheme, part, self.work.bucket.parts, self._sent.get(part.key))
        self.served.decode(part, flags, None if flagged else answer)
        if part is [part for part in self.work.bucket.parts if part.round == self.work.bucket.parts[-1].round][-1]:
            self.work.store()  # in the thread of the last result


def served(layout: Layout, part: Any, step: int) -> Any:
    """A server's answer to other ranks' contributions: of this part and step always the same."""
    bucket = layout.buckets[0]
    scheme = parse_scheme(bucket.codec, BucketContext(bucket.dtype))
    assert type(scheme) is PairScheme
    pull, numel = scheme.pair.pull, part.numel
    acc = np.random.default_rng([part.key & 0xFFFF, step]).standard_normal(numel).astype(pull.acc_dtype)
    out = np.zeros(pull.payload_bound(numel), np.uint8)
    count = 0
    for lo, hi in slices(pull, numel):
        new = np.zeros(hi - lo, np.float32) if pull.feedback else None
        old = np.zeros(hi - lo, np.float32) if pull.feedback else None
        stream = Stream(layout.seed, step, 0xFFFFFFFF, 0, part.offset, layout.number)
        count = pull.finish(acc[lo:hi], numel, lo, hi, 2, old, new, 1.0, stream, out).payload_bytes
    return out[:count]


def summed(scheme: Scheme, part: Any, parts: Any, payload: Any) -> Any:
    """A server's answer where two ranks have pushed the same payload."""
    if payload is None:
        return None
    whole = next(p for p in parts if p.round == 0 and p.offset == part.offset)
    round_ = scheme.rounds(whole.numel)[part.round]
    push, pull, numel = round_.pair.push, round_.pair.pull, round_.numel
    acc, out = np.empty(numel, push.acc_dtype), np.zeros(pull.payload_bound(numel), np.uint8)
    for lo, hi in slices(push, numel):
        push.fold([payload, payload], numel, lo, hi, acc[lo:hi], True)
    count = 0
    for lo, hi in slices(pull, numel):
        new = np.zeros(hi - lo, np.float32) if pull.feedback else None
        old = np.zeros(hi - lo, np.float32) if pull.feedback else None
        divisor = 2 if round_.divides else 1
        count = pull.finish(acc[lo:hi], numel, lo, hi, divisor, old, new, 1.0, Stream(0, 1, 0, 0), out).payload_bytes
    return out[:count]
