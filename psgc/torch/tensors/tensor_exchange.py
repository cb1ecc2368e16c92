"""Synchronizes a fixed list of tensors, bucket by bucket: broadcasts, and groups of push_pulls.

What optimizers send, step after step, is synchronized by ``gradients/exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.layout import Declaration
from psgc.torch.tensors.sent import FilledBucket
from psgc.worker.session import Session


class TensorExchange:
    """The tensors of one declaration. Making it waits until every rank has declared the same."""

    def __init__(self, session: Session, declaration: Declaration) -> None:
        self._session, self._buckets = session, FilledBucket.all_of(session.declare(declaration))

    def run(self, tensors: Sequence[torch.Tensor], *, skip: bool = False) -> None:
        """One step: on return each tensor holds what the declaration makes of all ranks' (the mean, the sum, the root's). skip: this rank has nothing to
        add."""
        for bucket in self._buckets:
            for index in bucket.bucket.tensors:
                bucket.put(index, tensors[index], takes_part=not skip)
            bucket.bind()
            bucket.send(self._session)
        self._session.wait([bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        for bucket in self._buckets:
            bucket.take()
