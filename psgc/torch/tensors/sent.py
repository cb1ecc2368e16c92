"""A bucket of a declared layout, and its step under way: what all that is synchronized bucket by bucket has in common.

What optimizers send, step after step, is synchronized by ``gradients/exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from psgc.layout import Bucket, Declaration, Layout
from psgc.torch.tensors.buffers import Array, TensorsBuffer, staging_dtype, where_of
from psgc.worker.session import BucketBuffer, Session, Ticket


@dataclass(slots=True, eq=False)
class SentBucket:
    """ticket: of the step under way; None while that has not left."""

    layout: Layout
    bucket: Bucket
    buffer: BucketBuffer
    ticket: Ticket | None = None

    @property
    def group(self) -> int:
        """The parameter group of all its tensors, where residuals follow learning rates."""
        return self.layout.tensors[self.bucket.tensors[0]].group

    @property
    def skip(self) -> bool:
        """Whether this rank skips the bucket: none of its tensors takes part."""
        raise NotImplementedError

    def lie_in(self, memory: Array | None) -> None:
        """Lay the tensors out in this memory, which servers read (``Session.memory``); None: there is none."""

    def bind(self) -> None:
        """Hand the tensors to the buffer for the step that is about to be submitted."""

    def bind_nothing(self) -> None:
        """Bind the buffer for a step that this rank skips and whose result it does not need."""
        raise NotImplementedError

    def send(self, session: Session, previous_skipped: int = 0, rescale: float = 1.0) -> None:
        """Submit the step for which the buffer is bound; as of ``Session.submit``."""
        self.ticket = session.submit(
            self.layout, self.bucket.index, self.buffer, skip=self.skip, previous_skipped=previous_skipped, rescale=rescale
        )  # fmt: skip

    def arrive(self) -> None:
        """The step is over: whatever the calling thread does to the tensors now comes after what is still written to them."""

    def reset(self) -> None:
        """Wait for all tensors anew."""
        self.ticket = None

    def release(self) -> None:
        """The layout is given up."""


def buffer_of(layout: Layout, bucket: Bucket, on_gpu: bool, late: bool) -> TensorsBuffer:
    """on_gpu: whether tensors on a GPU may be encoded there, where the layout leaves that open. late: as the buffer's."""
    shapes = [layout.tensors[i].shape for i in bucket.tensors]
    return TensorsBuffer(shapes, staging_dtype(bucket.codec, bucket.dtype), where_of(bucket, on_gpu), late)


@dataclass(slots=True, eq=False)
class FilledBucket(SentBucket):
    """Of tensors that are handed in for each step. tensors: so far, by their index; takes_part: whether any of them does."""

    buffer: TensorsBuffer
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    takes_part: bool = False

    @classmethod
    def all_of(cls, layout: Layout, on_gpu: bool = False) -> list[FilledBucket]:
        """on_gpu: as of ``buffer_of``."""
        return [cls(layout, bucket, buffer_of(layout, bucket, on_gpu, late=False)) for bucket in layout.buckets]

    @property
    def complete(self) -> bool:
        return len(self.tensors) == len(self.bucket.tensors)

    def put(self, index: int, tensor: torch.Tensor, takes_part: bool = True) -> None:
        """Of this step."""
        self.tensors[index] = tensor
        self.takes_part = self.takes_part or takes_part

    def lie_in(self, memory: Array | None) -> None:
        if memory is not None and len(self.bucket.tensors) > 1:  # a lone tensor is the bucket itself
            self.buffer.lie_in(memory)

    @property
    def skip(self) -> bool:
        return not self.takes_part

    def bind(self) -> None:
        self.buffer.bind([self.tensors[index] for index in self.bucket.tensors])

    def take(self) -> None:
        """The step is over, and the tensors hold what came."""
        for tensor in self.tensors.values():
            torch.autograd.graph.increment_version(tensor)  # it was written behind autograd's back
        self.reset()

    def reset(self) -> None:
        self.tensors, self.takes_part, self.ticket = {}, False, None


class TensorExchange:
    """A fixed list of tensors, as broadcasts and groups of push_pulls have. Making it waits until every rank has declared the same."""

    def __init__(self, session: Session, declaration: Declaration) -> None:
        made = FilledBucket.all_of(session.declare(declaration))
        self._session, self._buckets = session, [bucket for bucket in made if bucket.bucket.is_of(session.rank)]

    def run(self, tensors: Sequence[torch.Tensor], *, skip: bool = False, first: int = 0) -> None:
        """One step: on return each tensor holds what the declaration makes of all ranks' (the mean, the sum, the root's). skip: this rank has nothing to
        add. first: the number of the first tensor among the declaration's."""
        for bucket in self._buckets:
            for index in bucket.bucket.tensors:
                bucket.put(index, tensors[index - first], takes_part=not skip)
            bucket.bind()
            bucket.send(self._session)
        self._session.wait([bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        for bucket in self._buckets:
            bucket.take()
