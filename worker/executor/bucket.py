"""A bucket whose option runs over groups: its parts at work, its gradient's memory, and what it keeps between steps.

It offers what ``worker/bucket.py`` offers of buckets over servers: what is remembered by tensor, so that a state can be saved and loaded in a
job with other options. Numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from psgc.codecs import Stream
from psgc.codecs.scheme import PairScheme
from psgc.errors import UsageError
from psgc.layout import Bucket, Layout, Part
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.worker.executor.part import PartWork
from psgc.worker.nonfinite import first_nonfinite
from psgc.worker.residuals.owed import Owed
from psgc.worker.residuals.residual import ExactResidual, TensorMemory
from psgc.worker.session import BucketBuffer


class GroupBucket:
    """See the module's text."""

    def __init__(self, layout: Layout, bucket: Bucket, ranks: Ranks, rank: int) -> None:
        self.layout, self.bucket = layout, bucket
        scheme = layout.scheme(bucket)
        if type(scheme) is not PairScheme:
            raise UsageError(
                f"codec {scheme.canonical} runs over servers alone, not by {' '.join(bucket.option)}; choose another codec or option"
            )
        self.scheme = scheme
        divisor = ranks.size if layout.mean else 1
        self.step = 0
        is_broadcast = layout.kind == "broadcast"
        stream = Stream(layout.seed, 0, rank, bucket.index, 0, layout.number)
        self.parts = [
            PartWork(
                compile_option(bucket.option, part.numel, ranks, layout.root if is_broadcast else bucket.index + number)[rank],
                scheme.pair,
                bucket.dtype,
                part.offset,
                stream,
                divisor,
            )
            for number, part in enumerate(bucket.parts)
        ]
        self.keeps_residual = any(part.keeps_residual for part in self.parts)
        self._buffer: BucketBuffer | None = None
        self._owed: Owed | None = None

    @property
    def name(self) -> str:
        return f"{self.layout.name}/{self.bucket.index}"

    @property
    def first_tensor(self) -> str:
        return self.layout.tensors[self.bucket.tensors[0]].name

    def begin(self, buffer: BucketBuffer, skip: bool, previous_skipped: bool, rescale: float, check: bool = False) -> str | None:
        """A step starts; the last one has been stored. check: answer with the first tensor that holds a NaN or infinity."""
        self._buffer = buffer
        self.step += 1
        array = buffer.load()
        if check and not skip and (first := first_nonfinite(array, self.bucket.dtype)) is not None:
            return self.layout.tensor_at(self.bucket, first)
        if skip:
            array.fill(0)
        if self._owed is not None and not self._owed.begin(previous_skipped, rescale):
            self._owed = None
        for part, work in zip(self.bucket.parts, self.parts, strict=True):
            own = array[part.offset : part.offset + part.numel]
            if self._owed is not None:
                self._owed.add_to(own, part.offset)
            work.begin(own, self.layout.past_steps + self.step, skip, previous_skipped, rescale)
        return None

    def end(self, number: int) -> None:
        """A part's control word has been agreed on."""
        work, part = self.parts[number], self.bucket.parts[number]
        work.end()
        if self._owed is not None and (work.control.nonfinite or not work.control.contributed):
            self._owed.unpaid(part.offset)

    def store(self) -> None:
        """All parts are through: give the aggregate to its tensors."""
        assert self._buffer is not None
        self._buffer.store(not any(work.control.contributed for work in self.parts))
        self._buffer = None

    # between steps

    def remembered(self, dropped: bool = False) -> dict[str, TensorMemory]:
        """What is kept between steps, by tensor; none of its steps may be under way. dropped: the trainer did not apply the last result."""
        if not self.keeps_residual and self._owed is None:
            return {}
        values = np.zeros(self.bucket.numel, np.float32)
        for part, work in zip(self.bucket.parts, self.parts, strict=True):
            values[part.offset : part.offset + part.numel] = work.remembered(dropped)
        if self._owed is not None:
            values += self._owed.left(dropped)
        return {name: TensorMemory(values[place].copy()) for name, place in self.tensor_places()}

    def remember(self, memories: Mapping[str, TensorMemory]) -> None:
        """Go on from what was remembered of these tensors, by whatever option: it is owed to the first gradient, which is encoded with it."""
        values = np.zeros(self.bucket.numel, np.float32)
        for name, place in self.tensor_places():
            memory = memories.get(name, TensorMemory())
            if memory.residual is not None:
                values[place] = memory.residual
        self._owed = Owed(values) if values.any() else None

    def exact(self, dropped: bool = False) -> dict[int, ExactResidual]:
        """Nothing that ``remembered`` rounds."""
        return {}

    def set_exact(self, residuals: Mapping[int, ExactResidual]) -> None:
        """Nothing is kept that exactly."""

    def server_parts(self) -> list[Part]:
        """No server keeps anything of it."""
        return []

    def tensor_places(self) -> Iterator[tuple[str, slice]]:
        """Where each tensor's elements lie in the bucket."""
        return self.layout.places(self.bucket)
