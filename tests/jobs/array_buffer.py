"""A bucket that is one flat array, for workers without torch."""

from __future__ import annotations

from typing import Any

import numpy as np


class ArrayBuffer:
    waits = False

    def __init__(self, numel: int, dtype: Any) -> None:
        self.array = np.zeros(numel, dtype)
        self.skipped = False

    def load(self) -> Any:
        return self.array

    def store(self, skipped: bool) -> None:
        self.skipped = skipped
