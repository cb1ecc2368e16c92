"""Gradients that are averaged without a barrier at the end of a step: each bucket's mean is waited for when its parameters are needed next.

Owns when buckets leave and when they are awaited. A bucket is filled by backward, leaves when its last gradient is ready, is awaited after ``take``, goes to
an update of its parameters, and is free again once that has been applied.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.forward_waits import ForwardWaits
from psgc.torch.gradients.front_end import HookedFrontEnd
from psgc.torch.plans.fusing import buckets_in_order

CHANGED: Final = (
    "CrossBarrier: the gradient of {name!r} was changed between backward() and step(), when it is under way; clipping needs all gradients of a step at once: "
    "use DistributedOptimizer for it"
)


class UnbarrieredGradients(HookedFrontEnd):
    """model: whose layers wait. specs: of its parameters whose gradients are averaged. apply: called with parameters and their means, in the thread that waits,
    once for each bucket and step that some rank had a gradient in. passes: backwards that add up to a step. Raises UsageError for a parameter that is not the
    model's, or that two layers share."""

    def __init__(
        self, exchange: GradientExchange[GradientBucket], passes: int, model: torch.nn.Module, specs: Mapping[torch.Tensor, TensorSpec],
        apply: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None], as_views: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(exchange, passes, late=True, as_views=as_views)
        self._waits = ForwardWaits(model, self.wait)
        self._unawaited: list[torch.Tensor] = []  # parameters that no forward waits for
        for parameter, spec in specs.items():
            if not self._waits.owns(parameter):
                raise UsageError(
                    f"CrossBarrier: parameter {spec.name!r} of the optimizer is not the model's, so no layer would wait for it; use DistributedOptimizer "
                    f"for it"
                )
        self.follow(specs.items())
        self._apply = apply
        self._awaited: dict[GradientBucket, tuple[torch.Tensor | None, ...]] = {}  # this rank's own gradients, to be replaced by the means
        self._steps = 0

    def check_leaving(self) -> None:
        if self.gradients.under_way():
            raise UsageError("suspend() between backward() and step(); call it after step()")

    def settle(self) -> None:
        """Apply all updates."""
        self.wait()

    # when a bucket leaves

    def enter(self, gradient: Gradient) -> None:
        if gradient.bucket in self._awaited:
            raise UsageError(
                f"CrossBarrier: forward used {gradient.spec.name!r} before its update of the last step had come, since the layer's own forward did not "
                f"run; call the layer instead of reading its parameter, or use DistributedOptimizer"
            )
        self.exchange.begin()

    def prepare(self) -> None:
        """A step begins: once, declare all gradients, those that rank 0's forwards have needed first with the highest priority; wait until every rank has."""
        self.session.check()
        if self.exchange.buckets:
            return
        order, self._unawaited = self._waits.learn(gradient.parameter for gradient in self.gradients)
        indices, by_root = self._agreed([self.gradients.index(parameter) for parameter in order])
        config, choice = self.session.config, self.exchange.choice
        codecs = [choice.codec_of(gradient.spec.name, gradient.parameter) for gradient in self.gradients]
        least = config.min_compress_bytes if choice.rule is None else 0
        fused = buckets_in_order(self.exchange.specs, codecs, indices, by_root, config.fuse_bytes, least)
        own = [index for index, gradient in enumerate(self.gradients) if gradient.passes]
        self.declare(indices, own, fused, awaited_singly=True)

    def _agreed(self, order: list[int]) -> tuple[list[int], set[int]]:
        """Rank 0's order, and the gradients that it has, on every rank; this rank's own where it has other parameters, which the declaration then tells."""
        name = f"order of {self.exchange.name}"
        used = [index for index, gradient in enumerate(self.gradients) if gradient.seen is not None]
        if self.session.rank == 0:
            self.session.publish(name, zlib.compress(json.dumps([order, used]).encode()))
        agreed, by_root = json.loads(zlib.decompress(self.session.lookup(name)))
        return (agreed, set(by_root)) if sorted(agreed) == sorted(order) else (order, set(used))

    def take(self) -> int:
        """The trainer steps, all updates of whose last step have been applied: submit what has not left, and await all of it from now on, at once where no
        forward does. Returns the step's number, from 1. Raises UsageError for a gradient that was changed since backward."""
        exchange = self.exchange
        with self._lock:
            self.gradients.look_again(late=True, changed=CHANGED)
            exchange.begin()
            self._steps += 1
            exchange.submit_rest()
            self._awaited = {bucket: tuple(gradient.parameter.grad for gradient in bucket.gradients) for bucket in exchange.buckets}
            for gradient in self.gradients:
                gradient.passes, gradient.seen, gradient.parameter.grad = 0, None, None
            exchange.deliver()
            exchange.end_step()
        self.wait(self._unawaited)
        return self._steps

    # who takes the mean

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """On return the updates of these parameters have been applied; None: of all."""
        with self._lock:
            if parameters is None:
                wanted = list(self._awaited)
            else:
                found = (self.gradients[self.gradients.index(each)].bucket for each in parameters if self.gradients.knows(each))
                wanted = [bucket for bucket in dict.fromkeys(found) if bucket in self._awaited]
            for bucket in wanted:
                self._finish(bucket, self._awaited[bucket])

    def _finish(self, bucket: GradientBucket, gradients: Sequence[torch.Tensor | None]) -> None:
        self.exchange.wait([bucket])
        del self._awaited[bucket]
        bucket.reset()
        bucket.buffer.arrive()
        if bucket.buffer.skipped:
            return
        parameters, means = [], []
        for gradient, own, made in zip(bucket.gradients, gradients, bucket.buffer.made, strict=True):
            mean = made if own is None else own
            if mean is not None and gradient.parameter.requires_grad:
                parameters.append(gradient.parameter)
                means.append(mean)
        self._apply(parameters, means)
