"""An optimizer's momenta, which travel in place of gradients: OneBitAdam's and ZeroOneAdam's.

A bucket leaves as soon as the optimizer has computed what it sends, so that this runs while other buckets travel. The mean takes that one's place. A step is
over when all means are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.plans.choice import Choice
from psgc.torch.state.saved import MOMENTA
from psgc.torch.tensors.sent import FilledBucket
from psgc.worker.session import Session


class Momenta(FrontEnd[FilledBucket]):
    """of: the name of the optimizer's gradients. codec: canonical text."""

    def __init__(self, session: Session, of: str, codec: str) -> None:
        super().__init__(GradientExchange(session, f"{of}.momentum", Choice(codec), whole=True, scaled=False), MOMENTA)

    def check_leaving(self) -> None:
        if self.exchange.specs:
            raise UsageError("suspend(): OneBitAdam and ZeroOneAdam cannot go on in another job; save their state, and start a new job")

    def average(self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor], outgoing: Callable[[int], torch.Tensor]) -> None:
        """The mean over all ranks of ``outgoing(i)``, one tensor for each spec, in place. specs: once more tensors than before, all are declared anew, and what
        codecs keep goes along. parameters: whose they are. outgoing: is asked once, in the order of buckets; never for a tensor without elements."""
        exchange, everything = self.exchange, tuple(range(len(specs)))
        if specs != exchange.specs:
            exchange.specs = specs
            exchange.switch(exchange.choice)
        exchange.begin()
        if not exchange.declared:
            exchange.declare(lambda made: FilledBucket.all_of(made.layout), specs, parameters, everything, everything)
        for bucket in exchange.buckets:
            for index in bucket.bucket.tensors:
                bucket.put(index, outgoing(index))
            exchange.submit(bucket)
        exchange.wait()
        for bucket in exchange.buckets:
            bucket.take()
        exchange.deliver()
        exchange.end_step()
