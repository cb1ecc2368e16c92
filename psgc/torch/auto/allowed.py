"""Which codecs an exchange may choose from: those that its level of quality allows, at this step and by their errors on its gradients.

Every rank samples its own gradients; ranks tell each other the errors when they plan, so all of them know the largest. What was given up is never chosen again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from psgc.plan.live.levels import all_candidates, candidates, loss_of_codec, stage_of
from psgc.plan.live.outlook import MOST_ENCODES
from psgc.plan.model.level import SAFE
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.quality import RELAY, allowed, encodings
from psgc.torch.auto.sampling import GradientSample
from psgc.torch.gradients.exchange import GradientExchange


class Allowed:
    """tried: all codecs that the level has at any step. Ranks whose gradients lie on GPUs leave it to rank 0 to look at errors, because kernels for the CPU may
    not be compiled there."""

    def __init__(self, exchange: GradientExchange[Any], sample: torch.Tensor) -> None:
        self._exchange, self._level = exchange, exchange.choice.quality
        self._judges = not (sample.is_cuda and exchange.session.rank)
        self.tried = [codec for codec in all_candidates(self._level) if codec != UNCOMPRESSED]
        self._stage = 0
        self._sampled: GradientSample | None = None  # of the step under way, or the last one that was sampled
        self._sampling = False
        self._given_up: set[str] = set()  # codecs whose relative error grew beyond the level's limit
        self._errors: dict[str, float] = {}  # on any rank, when the job planned last

    @property
    def dtypes(self) -> set[str]:
        return {spec.dtype for spec in self._exchange.specs}

    @property
    def carried(self) -> list[str]:
        """Those of ``tried`` that carry the gradients' dtypes."""
        return [codec for codec in all_candidates(self._level, self.dtypes) if codec != UNCOMPRESSED]

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        """Backward has finished this tensor's gradient."""
        if self._sampling and self._sampled is not None:
            self._sampled.take(name, gradient)

    def sample_next(self, wanted: bool) -> None:
        """Whether the next step's gradients are sampled."""
        self._sampling = wanted
        if wanted:
            self._sampled = GradientSample(sum(spec.numel for spec in self._exchange.specs))

    def widen(self, steps: int) -> bool:
        """So many steps are over. Returns whether more codecs may be tried by now."""
        before, self._stage = self._stage, max(self._stage, stage_of(self._level, steps))
        return self._stage > before

    def codecs(self) -> list[str]:
        """All that may be chosen by now, whatever their errors."""
        return candidates(self._level, self._stage, self.dtypes)

    def allows(self, codec: str) -> bool:
        """Whether its errors allow it."""
        if codec in self._given_up:
            return False
        return self._fits(codec)

    def _fits(self, codec: str) -> bool:
        return allowed(codec, self._level, encodings=MOST_ENCODES, error=self._errors.get(codec), dtypes=self.dtypes)

    def own_errors(self) -> list[float]:
        """Of each of ``tried`` the relative error on this rank's gradients; -1 if it is not known, or need not be."""
        return [self._own_error(codec) for codec in self.tried]

    def _own_error(self, codec: str) -> float:
        known = self._level == SAFE and codec not in self._given_up and self._judges
        error = self._error(codec) if known else None
        return -1.0 if error is None else error

    def take_errors(self, rows: NDArray[Any]) -> None:
        """The ``own_errors`` of all ranks."""
        self._errors = {codec: float(error) for codec, error in zip(self.tried, rows.max(axis=0), strict=True) if error >= 0}

    def refused(self) -> list[str]:
        """Codecs whose relative error is too large, in words."""
        if self._level != SAFE:
            return []
        return [f"{codec} ({error:.2g})" for codec, error in self._errors.items() if not self._fits(codec)]

    def excess(self, buckets: Sequence[PlannedBucket]) -> float:
        """The relative error on this rank's gradients of what they travel by, if it is more than the level allows; else 0."""
        names: dict[str, list[str]] = {}
        often: dict[str, int] = {}
        for bucket in buckets if self._judges else ():
            names.setdefault(bucket.codec, []).extend(bucket.tensors)
            often[bucket.codec] = max(often.get(bucket.codec, 0), encodings(bucket))
        excess = 0.0
        for codec, of in names.items():
            error = None if codec == UNCOMPRESSED else self._error(codec, of)
            if error is not None and not allowed(codec, self._level, encodings=often[codec], error=error):
                excess = max(excess, error)
        return excess

    def give_up(self, buckets: Sequence[PlannedBucket]) -> None:
        """What these travel by loses too much of them."""
        self._given_up.add(max((bucket.codec for bucket in buckets), key=loss_of_codec))

    def _error(self, codec: str, names: Collection[str] | None = None) -> float | None:
        """The larger relative error of the codec's two halves on the gradients that were sampled last; None if that is not known."""
        if self._sampled is None:
            return None
        halves = [half for half in codec.split("/") if half not in (UNCOMPRESSED, RELAY)]
        errors = [error for half in halves if (error := self._sampled.relative_error(half, names)) is not None]
        return max(errors, default=None)
