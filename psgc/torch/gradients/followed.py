"""The gradients that one front end follows, and which of them take part in the coming step: those whose hook ran, and those whose p.grad was set by hand.

The mean that an earlier step left in p.grad is the same on all ranks and takes no part: it is set aside while backward adds to it, so that only the addition
travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.gradients.buckets import Gradient
from psgc.torch.gradients.hooks import Follower, follow
from psgc.torch.session.uncompiled import uncompiled

CHANGED: Final = (
    "gradient of {name!r} was changed between backward and its synchronization, when it may be under way; change gradients (clipping, for instance) after "
    "backward() has returned, under late synchronization after optimizer.synchronize()"
)
LOST: Final = "raised before it was over, so that gradients are incomplete; call optimizer.zero_grad()"


class Followed:
    """A list of gradients that only grows: a gradient's index in it stays. as_views: p.grad are to be views of their buckets' memory. sparse: names of
    those that are sparse."""

    def __init__(self, as_views: bool = False, sparse: frozenset[str] = frozenset()) -> None:
        self.as_views, self._sparse = as_views, sparse
        self._gradients: list[Gradient] = []
        self._known: dict[int, int] = {}  # indices by the ids of their parameters, which _gradients keeps alive
        self._accumulators: list[Any] = []  # what their hooks need to live
        self._ready: dict[int, None] = {}  # indices of those that are in no layout, in the order in which backward finished them

    def __getitem__(self, index: int) -> Gradient:
        return self._gradients[index]

    def __iter__(self) -> Iterator[Gradient]:
        return iter(self._gradients)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(gradient.spec for gradient in self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        return [gradient.parameter for gradient in self._gradients]

    def knows(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._known

    def index(self, parameter: torch.Tensor) -> int:
        return self._known[id(parameter)]

    def add(self, follower: Follower, parameters: Iterable[tuple[torch.Tensor, TensorSpec]]) -> bool:
        """Have ``follower`` called for these parameters' gradients, if they require one and are not followed yet. Returns whether there were any."""
        before = len(self._gradients)
        for parameter, spec in parameters:
            if parameter.requires_grad and not self.knows(parameter):
                self._known[id(parameter)] = len(self._gradients)
                self._gradients.append(Gradient(parameter, spec, spec.name in self._sparse))
                self._accumulators.append(follow(follower, self._gradients[-1], len(self._gradients) - 1))
        return len(self._gradients) > before

    def note_ready(self, index: int) -> None:
        """Backward has finished a gradient that is in no layout."""
        self._ready[index] = None

    def fresh(self, declared: int) -> list[Gradient]:
        """Those that are in no layout, after so many that are."""
        return self._gradients[declared:]

    def order(self, declared: int) -> tuple[int, ...]:
        """The order in which those of ``fresh`` became ready that this rank has, by their places there."""
        by_hand = (place for place, gradient in enumerate(self.fresh(declared)) if gradient.seen is not None)
        ready, self._ready = self._ready, {}
        return tuple(dict.fromkeys([*(index - declared for index in ready), *by_hand]))

    def look_again(self, late: bool, changed: str = CHANGED) -> None:
        """The step is about to be sent: see who takes part. late: what hooks have seen may be under way. Raises UsageError for a gradient that was changed when
        it may be (``changed``, with its name)."""
        for gradient in self._gradients:
            left = gradient.bucket is not None and gradient.bucket.ticket is not None
            gradient.look_again(left or late, changed)

    def under_way(self, passes: int = 1) -> str | None:
        """The name of one that so many backwards have added to in this step."""
        return next((gradient.spec.name for gradient in self._gradients if gradient.passes >= passes), None)

    @property
    def keeps_mean(self) -> bool:
        """Whether some p.grad has the last mean in it."""
        return any(gradient.mean.is_kept for gradient in self._gradients)

    @property
    def set_anew(self) -> bool:
        """Whether there are gradients, and none of them is a tensor that the last mean came in."""
        return any(gradient.parameter.grad is not None for gradient in self) and not any(gradient.mean.is_there for gradient in self)

    def note_step(self) -> None:
        """An optimizer has stepped on the means."""
        for gradient in self._gradients:
            gradient.mean.note_step()

    @uncompiled
    def note_zeros(self) -> None:
        """zero_grad has left zeros instead of None."""
        for gradient in self._gradients:
            gradient.note_zero()

    def reset(self) -> None:
        """The step is over, or forgotten."""
        for gradient in self._gradients:
            gradient.reset()

    def let_go(self) -> None:
        """Let go of means that a backward has set aside, and raised. Raises UsageError unless what it had added was cleared."""
        for gradient in self._gradients:
            if gradient.seen is not None and gradient.seen.same(gradient.parameter.grad):
                raise UsageError(f"the backward before this one {LOST} before the next one")
        for gradient in self._gradients:
            gradient.mean.aside = None
