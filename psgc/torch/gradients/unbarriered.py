"""Gradients that are averaged without a barrier at the end of a step: each bucket's mean is waited for when its parameters are needed next.

Owns the buckets' priorities (what forward needs first) and when they leave. A bucket is filled by backward, leaves when its last gradient is ready, is awaited
after ``take``, goes to an update of its parameters, and is free again once that has been applied.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from psgc.errors import UsageError
from psgc.layout import ITEM_BYTES, BucketSpec, TensorSpec
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.hooks import follow
from psgc.torch.plans.rules import codec_by_rule
from psgc.torch.session import api, speed
from psgc.torch.session.run_report import report_of
from psgc.worker.session import Session

# A bucket leaves with its last gradient, which is that of its first layer, and the next forward waits for all of it; so layers share less than otherwise.
MOST_FUSED_BYTES: Final = 512 << 10
# A tensor this many times smaller than the large one before it (a bias beside its weight) shares that one's bucket: own messages would cost more.
ALONG: Final = 16


@dataclass(slots=True, eq=False)
class Awaited:
    """A bucket that ``step`` has taken. gradients: each parameter's own contribution, to be replaced by the mean; None where it has none."""

    bucket: GradientBucket
    gradients: tuple[torch.Tensor | None, ...]


class UnbarrieredGradients:
    """apply: called with parameters and their means, in the thread that waits, once for each bucket and step that some rank had a gradient in.
    passes: backwards that add up to a step."""

    def __init__(
        self, exchange: GradientExchange[GradientBucket], passes: int, specs: Mapping[torch.Tensor, TensorSpec],
        apply: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:  # fmt: skip
        self.exchange, self.passes = exchange, passes
        exchange.specs = tuple(specs.values())
        self._apply = apply
        self._gradients = [Gradient(parameter, spec) for parameter, spec in specs.items()]
        self._index = {parameter: index for index, parameter in enumerate(specs)}
        self._awaited: dict[GradientBucket, Awaited] = {}
        self._steps = 0
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device
        for index, gradient in enumerate(self._gradients):
            follow(self, gradient, index)
        api.add_member(self)

    # of one session and the next

    @property
    def session(self) -> Session:
        return self.exchange.session

    def check_leaving(self) -> None:
        """Raise UsageError between backward and step()."""
        if self.busy:
            raise UsageError("suspend() between backward() and step(); call it after step()")

    def leave(self) -> None:
        """The session ends: apply all updates, and take along what codecs keep."""
        self.wait_all()
        self.exchange.leave()

    def rejoin(self, session: Session) -> None:
        """Go on in another session: tensors are declared anew by its first step()."""
        self.exchange.rejoin(session)

    # what hooks call

    def parameter(self, index: int) -> torch.Tensor:
        return self._gradients[index].parameter

    def coming(self, index: int) -> None:
        """Nothing is to be done before a gradient is added to."""

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread: counts, and submits the bucket that is complete."""
        gradient = self._gradients[index]
        grad = gradient.parameter.grad
        if grad is None:
            return
        with self._lock:
            bucket = gradient.bucket
            if bucket is not None and bucket in self._awaited:
                raise UsageError(
                    f"CrossBarrier: forward used {gradient.spec.name!r} before its update of the last step had come, since the layer's own forward did not "
                    f"run; call the layer instead of reading its parameter, or use DistributedOptimizer"
                )
            gradient.look(grad)
            if gradient.count_pass(self.passes) and bucket is not None:
                bucket.waiting -= 1
                if not bucket.waiting:
                    self._submit(bucket)

    # what the optimizer calls

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._index)

    @property
    def busy(self) -> bool:
        """Whether a backward has begun a step that ``step`` has not taken."""
        return any(gradient.passes for gradient in self._gradients)

    def declare(self, order: Iterable[torch.Tensor]) -> None:
        """Declare all gradients, those that forward needs first with the highest priority, and wait until every rank has. order: rank 0's counts."""
        indices, by_root = self._agreed([self._index[parameter] for parameter in order])
        own = [index for index, gradient in enumerate(self._gradients) if gradient.passes]
        exchange = self.exchange
        for layout in exchange.declare(
            exchange.specs, self.parameters, tuple(indices), own, self._in_order(indices, by_root), awaited_singly=True
        ):
            exchange.buckets += GradientBucket.all_of(layout, self._gradients)

    def _agreed(self, order: list[int]) -> tuple[list[int], set[int]]:
        """Rank 0's order, and the gradients that it has, on every rank; this rank's own where it has other parameters, which the declaration then tells."""
        name = f"order of {self.exchange.name}"
        used = [index for index, gradient in enumerate(self._gradients) if gradient.seen is not None]
        if self.session.rank == 0:
            self.session.publish(name, zlib.compress(json.dumps([order, used]).encode()))
        agreed, by_root = json.loads(zlib.decompress(self.session.lookup(name)))
        return (agreed, set(by_root)) if sorted(agreed) == sorted(order) else (order, set(used))

    def _in_order(self, order: Sequence[int], used: set[int]) -> tuple[BucketSpec, ...]:
        """Neighbours in the order share buckets, apart by codec, dtype and parameter group. A bucket of tensors from all over the model would leave
        with the last gradient, and the first layer would wait for it. Parameters without a gradient are by themselves, so that no one gives them zeros."""
        config, rule, buckets, near = self.session.config, self.exchange.choice.rule, list[BucketSpec](), list[int]()
        limit = room = min(config.fuse_bytes, MOST_FUSED_BYTES)
        filled = 0

        def close() -> None:
            kinds: dict[tuple[str, str, int], list[int]] = {}
            for member in near:
                kinds.setdefault(self._kind(member), []).append(member)
            for (codec, _, _), members in kinds.items():
                small = rule is None and sum(map(self._nbytes, members)) < config.min_compress_bytes
                buckets.append(BucketSpec(tuple(members), "none" if small else codec, -len(buckets)))
            near.clear()

        for index in (index for index in order if self._nbytes(index)):
            nbytes = self._nbytes(index)
            if filled + nbytes > room or index not in used or (near and near[-1] not in used):
                close()
                filled = 0
                room = max(limit, nbytes + nbytes // ALONG) if limit else 0
            near.append(index)
            filled += nbytes
        close()
        return tuple(buckets)

    def _nbytes(self, index: int) -> int:
        spec = self._gradients[index].spec
        return spec.numel * ITEM_BYTES[spec.dtype]

    def _kind(self, index: int) -> tuple[str, str, int]:
        gradient, choice = self._gradients[index], self.exchange.choice
        spec, rule = gradient.spec, choice.rule
        return (choice.codec if rule is None else codec_by_rule(rule, spec.name, gradient.parameter)), spec.dtype, spec.group

    def take(self) -> int:
        """The trainer steps: submit what has not left, and await all of it from now on. Returns the step's number, from 1. Raises UsageError for a
        gradient that was changed since backward."""
        self.wait_all()
        with self._lock:
            for gradient in self._gradients:
                self._check(gradient)
            self.exchange.begin()
            self.exchange.pay(self._gradients)
            self._steps += 1
            for bucket in self.exchange.buckets:
                if bucket.ticket is None:
                    self._submit(bucket)
                grads = tuple(gradient.parameter.grad for gradient in bucket.gradients)
                self._awaited[bucket] = Awaited(bucket, grads)
            for gradient in self._gradients:
                gradient.passes, gradient.seen, gradient.parameter.grad = 0, None, None
            self.exchange.last.deliver()
            self.exchange.last.end(applied=True)
        report_of(self.session).step_over(self.exchange.name)
        return self._steps

    def wait(self, parameters: Iterable[torch.Tensor]) -> None:
        """On return the updates of these parameters have been applied."""
        with self._lock:
            wanted = dict.fromkeys(self._gradients[self._index[parameter]].bucket for parameter in parameters if parameter in self._index)
            for bucket in wanted:
                awaited = self._awaited.get(bucket) if bucket is not None else None
                if awaited is not None:
                    self._finish(awaited)

    def wait_all(self) -> None:
        """On return all updates have been applied."""
        with self._lock:
            for awaited in list(self._awaited.values()):
                self._finish(awaited)

    def _finish(self, awaited: Awaited) -> None:
        bucket = awaited.bucket
        assert bucket.ticket is not None
        report_of(self.session).wait(self.exchange.name, [bucket.ticket])
        speed.look(self.session)
        del self._awaited[bucket]
        bucket.reset()
        bucket.buffer.arrive()
        if bucket.buffer.skipped:
            return
        parameters, means = [], []
        for gradient, own, made in zip(bucket.gradients, awaited.gradients, bucket.buffer.made, strict=True):
            mean = made if own is None else own
            if mean is not None and gradient.parameter.requires_grad:
                parameters.append(gradient.parameter)
                means.append(mean)
        self._apply(parameters, means)

    def _check(self, gradient: Gradient) -> None:
        """Let a gradient take part that was set by hand. Raises UsageError for one that was changed after its hook ran."""
        grad = gradient.parameter.grad
        if not gradient.passes:
            gradient.seen = None
            if grad is not None:
                gradient.look(grad)
        elif grad is None or grad is not gradient.seen or grad._version != gradient.version:
            raise UsageError(
                f"CrossBarrier: the gradient of {gradient.spec.name!r} was changed between backward() and step(), when it is under way; clipping "
                f"needs all gradients of a step at once: use DistributedOptimizer for it"
            )

    def _submit(self, bucket: GradientBucket) -> None:
        self.exchange.begin()
        bucket.bind()
        self.exchange.submit(bucket, bucket.skip)
