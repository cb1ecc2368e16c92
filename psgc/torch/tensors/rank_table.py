"""What ranks tell each other in a named tensor: an array of which all get the sum, or a table with a row of each rank. A rank may do other work until it looks
at what has come."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.layout import Declaration, TensorSpec
from psgc.worker.session import Session, Ticket


class SummedArray:
    """The buffer of a named tensor: every rank fills ``array``, and afterwards it holds the sum over ranks. Of integers, modulo 2 ** 64. what: it has."""

    waits = False

    def __init__(self, session: Session, name: str, numel: int, dtype: str, what: str) -> None:
        self.array: NDArray[Any] = np.zeros(numel, dtype)
        self._session = session
        self._declaration = Declaration(name, "adhoc", (TensorSpec(what, (numel,), dtype),), "none", mean=False)
        self._ticket: Ticket | None = None

    def leave(self) -> None:
        self._ticket = self._session.submit_named(self._declaration, self)

    @property
    def sent(self) -> bool:
        """Whether it is under way, or there and not looked at yet."""
        return self._ticket is not None

    def arrive(self) -> NDArray[Any]:
        """The sum, once all ranks have sent theirs."""
        assert self._ticket is not None
        self._session.wait([self._ticket])
        self._ticket = None
        return self.array

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        """Do nothing: the sum is in the array."""


class RankTable(SummedArray):
    """Every rank fills its own row, and the sum over ranks is the whole table."""

    def __init__(self, session: Session, name: str, columns: int) -> None:
        super().__init__(session, name, session.size * columns, "float64", "figures")
        self._rows = self.array.reshape(session.size, columns)

    def send(self, *row: float) -> None:
        self.array[:] = 0
        self._rows[self._session.rank] = row
        self.leave()

    def rows(self) -> NDArray[Any]:
        """Every rank's, once all have sent theirs."""
        self.arrive()
        return self._rows
