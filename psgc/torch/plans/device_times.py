"""What codecs cost on a GPU, and copies from it, measured beside the first steps of a training: by marks in the engine's own streams.

The first pass compiles kernels and copies payloads up; later ones are timed, and wait for nothing. The trainer's stream is not touched. Owns the sizes and what
is timed, on random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from psgc.codecs import parse_codec
from psgc.codecs.codec import Stream
from psgc.codecs.common.one_part import Part
from psgc.device.codec import DeviceCodec
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import CostCurve
from psgc.torch.device.engine import Engine
from psgc.torch.device.runtime import Mark
from psgc.torch.device.sent import STATUS_BYTES

SIZES: Final = (1 << 12, 1 << 16, 1 << 20)  # elements
PASSES: Final = 3
COPIED_BYTES: Final = 4 << 20
HOST_LATENCY_US: Final = 10.0  # of a copy, as the planner assumes it elsewhere
_NOWHERE: Final = Stream(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class _Part:
    """One codec at one size: memory on the device."""

    codec: DeviceCodec
    gradient: torch.Tensor
    residual: torch.Tensor
    payload: torch.Tensor
    room: torch.Tensor
    status: torch.Tensor


class DeviceTimes:
    """See the module's text. codecs: those without kernels for the device are left out."""

    def __init__(self, engine: Engine, codecs: Sequence[str]) -> None:
        self._engine = engine
        self._codecs = [text for text in codecs if engine.codec(parse_codec(text)) is not None]
        self._passes = 0
        self._parts: dict[tuple[str, int], _Part] = {}
        self._marks: dict[tuple[str, int], list[tuple[Mark, Mark, Mark]]] = {}
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None
        self._copies: list[tuple[Mark, Mark]] = []

    def enqueue(self) -> None:
        """One more pass over all codecs and sizes, PASSES of them in all. Raises DeviceError."""
        if self._passes == PASSES:
            return
        if not self._passes:
            self._parts = {(text, numel): self._part(text, numel) for text in self._codecs for numel in SIZES}
            self._copied = self._engine.empty(COPIED_BYTES, torch.uint8), self._engine.runtime.pinned(COPIED_BYTES)
            self._engine.compute_on(self._copied[0].zero_, [], [self._copied[0]])
        self._passes += 1
        marks = {key: self._pass(part) for key, part in self._parts.items()}
        copied = self._copy()
        if self._passes > 1:
            self._copies.append(copied)
            for key, found in marks.items():
                self._marks.setdefault(key, []).append(found)
        if self._passes == PASSES:
            self._parts = {}

    def _part(self, text: str, numel: int) -> _Part:
        engine, codec = self._engine, self._engine.codec(parse_codec(text))
        assert codec is not None
        made = np.ascontiguousarray(Part.filled(codec.codec, numel).payload)
        gradient, residual = engine.empty(numel, torch.float32), engine.empty(numel, torch.float32)
        room, payload = engine.empty(codec.codec.payload_bound(numel), torch.uint8), engine.empty(made.size, torch.uint8)
        status = engine.empty(STATUS_BYTES, torch.uint8).view(torch.int64)
        engine.compute.wait(engine.upload(made, payload))

        def fill() -> None:
            gradient.normal_(generator=torch.Generator(gradient.device).manual_seed(0))  # torch's own generator is the training's
            residual.zero_()
            status.zero_()

        engine.compute_on(fill, [], [gradient, residual, status])
        return _Part(codec, gradient, residual, payload, room, status)

    def _pass(self, part: _Part) -> tuple[Mark, Mark, Mark]:
        """Marks before encoding, before the residual's commit and decoding, and after them."""
        engine, codec, gradient, residual = self._engine, part.codec, part.gradient, part.residual
        numel, kept = gradient.numel(), residual if codec.codec.feedback else None
        with engine.scratch(codec.scratch_bytes(numel)) as scratch:
            began = engine.compute.mark()
            engine.compute_on(
                lambda: codec.encode(gradient, kept, 1.0, _NOWHERE, part.room, part.status, scratch),
                [gradient, residual],
                [part.room, part.status, scratch],
            )
            encoded = engine.compute.mark()

        def apply() -> None:
            if kept is not None:
                codec.commit(part.payload, numel, gradient, kept, 1.0)
            codec.decode(part.payload, numel, gradient)

        engine.compute_on(apply, [part.payload, gradient, residual], [residual, gradient])
        return began, encoded, engine.compute.mark()

    def _copy(self) -> tuple[Mark, Mark]:
        """To the host, behind what has been enqueued."""
        assert self._copied is not None
        down, (source, host) = self._engine.down, self._copied
        down.wait(self._engine.compute.record())
        began = down.mark()
        down.run(lambda: host.copy_(source, non_blocking=True), [source], [host])
        return began, down.mark()

    def curves(self) -> dict[str, CostCurve]:
        """By codec, of those whose every size the device has come to."""
        found = {}
        for text in self._codecs:
            sizes = [_least(self._marks.get((text, numel), [])) for numel in SIZES]
            known = [each for each in sizes if each is not None]
            if len(known) == len(SIZES):
                encode, decode = zip(*known, strict=True)
                found[text] = CostCurve(tuple(map(float, SIZES)), encode, decode)
        return found

    def host_link(self) -> Link | None:
        """Between the GPU and the host, down; None while the device has not come to it."""
        times = [us for began, ended in self._copies if (us := began.us_to(ended)) is not None]
        return Link(8e-3 * COPIED_BYTES / min(times), HOST_LATENCY_US) if times and min(times) > 0 else None


def _least(marks: Sequence[tuple[Mark, Mark, Mark]]) -> tuple[float, float] | None:
    """Microseconds of encoding and of decoding, of the quickest passes; None where the device has not come to any. A clock may have no finer steps than one."""
    times = [(a.us_to(b), b.us_to(c)) for a, b, c in marks]
    known = [(encode, decode) for encode, decode in times if encode is not None and decode is not None]
    return (max(1e-3, min(e for e, _ in known)), max(1e-3, min(d for _, d in known))) if known else None
