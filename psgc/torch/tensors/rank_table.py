"""A table by which ranks tell each other figures: a row of each. It travels as a named tensor; a rank may do other work until it looks at the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.layout import Declaration, TensorSpec
from psgc.worker.session import Session, Ticket


class RankTable:
    """The buffer of a named tensor: every rank fills its own row, and the sum over ranks is the whole table."""

    waits = False

    def __init__(self, session: Session, name: str, columns: int) -> None:
        self._session = session
        self._flat = np.zeros(session.size * columns, np.float64)
        self._rows = self._flat.reshape(session.size, columns)
        self._declaration = Declaration(name, "adhoc", (TensorSpec("figures", self._flat.shape, "float64"),), "none", mean=False)
        self._ticket: Ticket | None = None

    def send(self, *row: float) -> None:
        self._flat[:] = 0
        self._rows[self._session.rank] = row
        self._ticket = self._session.submit_named(self._declaration, self)

    @property
    def sent(self) -> bool:
        """Whether it is under way, or there and not looked at yet."""
        return self._ticket is not None

    def rows(self) -> NDArray[Any]:
        """Every rank's, once all have sent theirs."""
        assert self._ticket is not None
        self._session.wait([self._ticket])
        self._ticket = None
        return self._rows

    def load(self) -> NDArray[Any]:
        return self._flat

    def store(self, skipped: bool) -> None:
        """Do nothing: the sum is in the array."""
