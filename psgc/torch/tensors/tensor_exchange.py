"""Synchronizes a fixed list of tensors, bucket by bucket: broadcasts, and groups of push_pulls.

Owns their layout and buffers. What optimizers send, step after step, is synchronized by ``gradients/exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.layout import Declaration
from psgc.torch.tensors.buffers import TensorsBuffer, staging_dtype
from psgc.worker.session import Session


class TensorExchange:
    """The tensors of one declaration. Making it waits until every rank has declared the same."""

    def __init__(self, session: Session, declaration: Declaration) -> None:
        self._session = session
        self._layout = session.declare(declaration)
        tensors = self._layout.tensors
        self._buffers = [
            TensorsBuffer([tensors[i].shape for i in bucket.tensors], staging_dtype(bucket.codec, bucket.dtype))
            for bucket in self._layout.buckets
        ]

    def run(self, tensors: Sequence[torch.Tensor], *, skip: bool = False) -> None:
        """One step: on return each tensor holds what the declaration makes of all ranks' (the mean, the sum, the root's). skip: this rank has nothing to
        add."""
        tickets = []
        for bucket, buffer in zip(self._layout.buckets, self._buffers, strict=True):
            buffer.bind([tensors[i] for i in bucket.tensors])
            tickets.append(self._session.submit(self._layout, bucket.index, buffer, skip=skip))
        self._session.wait(tickets)
        for i in (i for bucket in self._layout.buckets for i in bucket.tensors):
            torch.autograd.graph.increment_version(tensors[i])  # it was written behind autograd's back
