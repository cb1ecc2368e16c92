"""Whether an optimizer's step is linear in the gradient. That decides which codecs suit it, and whether residuals may follow its learning rate.

Error feedback delays the part of a gradient that a codec leaves out. SGD's steps add up gradients, so a delayed part has the same effect in
the end; an optimizer that divides by a statistic of earlier gradients (Adam) or takes their sign (Lion) sees it as a spike. A class's name
does not tell which kind an optimizer is; so only ``torch.optim.SGD``, and subclasses that keep no more than its momentum, count as linear.

Even then residuals stay as they are when the learning rate changes. With momentum the parameters' movement is a sum over many
steps' rates, and a residual scaled by rate_before / rate_now grows without bound where a rate falls far and rises again (warm restarts,
OneCycle): the factor is right for plain SGD alone, and there it is an option.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Final

import torch

from psgc.errors import UsageError
from psgc.layout import Layout
from psgc.plan.model.quality import costs_under_adam

logger = logging.getLogger(__name__)


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's SGD, or a subclass that (so far) keeps nothing but SGD's momentum."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return all(set(state) <= {"momentum_buffer"} for state in optimizer.state.values())


class CodecAdvice:
    """Warns once of codecs that do not suit an optimizer, after its first steps: they show which codecs gradients travel by, where small tensors go
    uncompressed, and what the optimizer keeps."""

    LOOKS: Final = 2  # state appears in the first step that has gradients

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # that are left

    def look(self, optimizer: torch.optim.Optimizer, layouts: Callable[[], Iterable[Layout]]) -> None:
        """The optimizer has stepped on gradients of these layouts."""
        left = self._looks.get(optimizer, self.LOOKS)
        codecs = sorted({bucket.codec for layout in layouts() for bucket in layout.buckets}) if left else []
        if not codecs:
            return
        self._looks[optimizer] = left - 1
        coarse = [codec for codec in codecs if costs_under_adam(codec)]
        if coarse and not is_linear(optimizer):
            self._looks[optimizer] = 0
            logger.warning(
                "codec %s with %s: what it loses can cost quality under optimizers that are not linear in the gradient, as Adam and "
                "Lion; bf16 or int8 do not, SGD with momentum takes any codec, and psgc.torch.OneBitAdam is made for 1-bit",
                ", ".join(coarse), type(optimizer).__name__,
            )  # fmt: skip

    def look_anew(self) -> None:
        """Gradients travel by another choice from now on."""
        self._looks.clear()


def learning_rates(optimizer: torch.optim.Optimizer) -> Callable[[], tuple[float, ...]]:
    """Reads the learning rate of each parameter group, which residuals then follow; by weak reference, for the optimizer owns the reader.

    Raises UsageError, now and at each reading, unless the optimizer is SGD without momentum.
    """
    reference = weakref.ref(optimizer)

    def rates() -> tuple[float, ...]:
        found = reference()
        if found is None:
            return ()
        if not is_linear(found) or any(group.get("momentum") for group in found.param_groups):
            raise UsageError(
                f"residuals_follow_lr is for SGD without momentum, but this is {type(found).__name__}"
                f"{' with momentum' if is_linear(found) else ''}; leave it out: residuals then stay as they are when the rate changes"
            )
        return tuple(float(group["lr"]) for group in found.param_groups)

    rates()
    return rates
