"""Synchronizes a fixed list of tensors, bucket by bucket: used by broadcasts and by compressed momenta.

Owns their layout and buffers. Gradients, which become ready one by one, are synchronized by ``gradients/in_backward.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from psgc.errors import UsageError
from psgc.layout import Declaration
from psgc.torch.session import api
from psgc.torch.session.run_report import report_of
from psgc.torch.tensors.buffers import TensorsBuffer, staging_dtype
from psgc.worker.session import Session


class TensorExchange:
    """The tensors of one declaration. Making it waits until every rank has declared the same."""

    def __init__(self, session: Session, declaration: Declaration) -> None:
        self.session = session
        self.layout = session.declare(declaration)
        if self.layout.kind == "plan":
            report_of(session).laid_out(self.layout)
            api.add_member(self)
        tensors = self.layout.tensors
        self._buffers = [
            TensorsBuffer([tensors[i].shape for i in bucket.tensors], staging_dtype(bucket.codec, bucket.dtype))
            for bucket in self.layout.buckets
        ]

    def check_leaving(self) -> None:
        """Raise UsageError: an optimizer's compressed momenta stay in their session."""
        raise UsageError("suspend(): OneBitAdam and ZeroOneAdam cannot go on in another job; save their state, and start a new job")

    def leave(self) -> None:
        """Never called."""

    def rejoin(self, session: Session) -> None:
        """Never called."""

    def run(self, tensor: Callable[[int], torch.Tensor], *, skip: bool = False) -> None:
        """One step: on return each tensor holds what the declaration makes of all ranks' (the mean, the sum, the root's).

        tensor: gives the i-th tensor, to be read and overwritten; asked for just before its bucket leaves, so that the computation of
        one bucket runs while others travel. Never asked for a tensor without elements. skip: this rank has nothing to add.
        """
        tickets, bound = [], []
        for bucket, buffer in zip(self.layout.buckets, self._buffers, strict=True):
            members = [tensor(i) for i in bucket.tensors]
            buffer.bind(members)
            tickets.append(self.session.submit(self.layout, bucket.index, buffer, skip=skip))
            bound += members
        if self.layout.kind == "plan":  # of an optimizer: one of its steps
            report = report_of(self.session)
            report.wait(self.layout.name, tickets)
            report.step_over(self.layout.name)
        else:
            self.session.wait(tickets)
        for member in bound:
            torch.autograd.graph.increment_version(member)  # it was written behind autograd's back
