"""A bucket of one flat array, for workers without torch."""

from __future__ import annotations

from typing import Any


class ArrayBuffer:
    """``array`` is what is sent, and holds the result after ``store``."""

    waits = False

    def __init__(self, array: Any) -> None:
        self.array = array
        self.skipped = False

    def load(self) -> Any:
        return self.array

    def store(self, skipped: bool) -> None:
        self.skipped = skipped
