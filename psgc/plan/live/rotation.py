"""Takes turns among candidates that are all measured alike: every candidate runs for a window in each round, forwards and then backwards.

So a machine that slows down meanwhile, or other work on it, meets all of them alike. Unlike ``trials`` none leaves. Pure, and the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rotation:
    """candidates: how many; rounds: windows of each; place: how many windows are over."""

    candidates: int
    rounds: int
    place: int = 0

    @property
    def over(self) -> bool:
        return self.place >= self.candidates * self.rounds

    @property
    def present(self) -> int:
        """Whose turn it is; after the last window, whose it was."""
        lap, turn = divmod(min(self.place, self.candidates * self.rounds - 1), self.candidates)
        return turn if lap % 2 == 0 else self.candidates - 1 - turn

    def next(self) -> int:
        """The window is over: whose turn it is now."""
        self.place += 1
        return self.present
