"""What one time saves over another, as a share: one rule for plans, advice and what-if questions."""

from __future__ import annotations


def share_saved(time: float, other: float) -> float:
    """The share of the other time, in the same unit, that this one saves; 0 where the other is 0, of which there is no share."""
    return 1 - time / other if other else 0.0
