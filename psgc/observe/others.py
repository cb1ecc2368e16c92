"""A value beside the same of the others: what says that somebody stands out. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Of = TypeVar("Of", bound=Hashable)


def beyond_others(values: Mapping[Of, float]) -> dict[Of, float]:
    """By how much each value is above the lower median of the others; 0 where it is not. Empty for fewer than two.

    The lower median, because two that are slow among three are both beyond the third. Half and more that are equally slow are beyond nobody.
    """
    if len(values) < 2:
        return {}
    ordered = sorted(values.values())
    # Of those above it, whose own value is not among the lower half, this is the lower median of the others.
    middle = ordered[(len(ordered) - 2) // 2]
    return {of: max(0.0, value - middle) for of, value in values.items()}
