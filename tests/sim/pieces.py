"""States of a small model, kept piece by piece: what happens changes few of a state's pieces, and most states share theirs with many others.

A state is a tuple of numbers, one for each piece; a piece's number stands for its pickled bytes. Two pieces that differ only in ``left_out`` fields have the
same *kind*, and so states whose pieces are of the same kinds are the same state.
"""

from __future__ import annotations

import operator
import pickle
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

K = TypeVar("K")
Numbers = tuple[int, ...]


class Pieces:
    """All that there have been. left_out: names of fields that make no difference."""

    def __init__(self, left_out: frozenset[str]) -> None:
        self._left_out = left_out
        self._numbers: dict[bytes, int] = {}
        self._bytes: list[bytes] = []
        self._shown: list[Any] = []
        self._kinds: list[int] = []
        self._kind_of: dict[Any, int] = {}
        self._freeze: dict[type, Callable[[Any], Any]] = {}

    def number(self, piece: Any) -> int:
        packed = pickle.dumps(piece, pickle.HIGHEST_PROTOCOL)
        number = self._numbers.get(packed)
        if number is None:
            number = self._numbers[packed] = len(self._bytes)
            self._bytes.append(packed)
            self._shown.append(pickle.loads(packed))
            self._kinds.append(self._kind_of.setdefault(self.frozen(piece), len(self._kind_of)))
        return number

    def shown(self, number: int) -> Any:
        """To look at, and not to change."""
        return self._shown[number]

    def taken(self, number: int) -> Any:
        """A piece of one's own."""
        return pickle.loads(self._bytes[number])

    def kinds(self, numbers: Numbers) -> Numbers:
        return tuple(map(self._kinds.__getitem__, numbers))

    def frozen(self, value: Any) -> Any:
        """The same for pieces that are the same, whatever became of them in between."""
        freeze = self._freeze.get(type(value))
        if freeze is None:
            freeze = self._freeze[type(value)] = self._way(value)
        return freeze(value)

    def _way(self, value: Any) -> Callable[[Any], Any]:
        """How values of this one's type are frozen."""
        frozen = self.frozen
        name = type(value).__name__
        if isinstance(value, Enum | str | bytes | int | float | None.__class__):
            return lambda value: value
        if isinstance(value, dict):
            return lambda value: frozenset((frozen(key), frozen(each)) for key, each in value.items())
        if isinstance(value, set | frozenset):
            return lambda value: frozenset(map(frozen, value))
        if isinstance(value, list | tuple | deque | range):
            return lambda value: tuple(map(frozen, value))
        if is_dataclass(value):
            counted = [field.name for field in fields(value) if field.name not in self._left_out]
            if len(counted) < 2:
                return lambda value: (name, *(frozen(getattr(value, field)) for field in counted))
            read = operator.attrgetter(*counted)
            return lambda value: (name, *map(frozen, read(value)))
        left_out = self._left_out
        return lambda value: (name, frozen({field: each for field, each in vars(value).items() if field not in left_out}))


class Shown(MutableMapping[K, Any], Generic[K]):
    """Some of a state's pieces, by their keys. own: those that were asked for, where each is a copy to change; None: all are to look at."""

    def __init__(self, pieces: Pieces, places: dict[K, int], numbers: Numbers, own: dict[int, Any] | None = None) -> None:
        self._pieces, self._places, self._numbers, self._own = pieces, places, numbers, own

    def __getitem__(self, key: K) -> Any:
        place = self._places[key]
        if self._own is None:
            return self._pieces.shown(self._numbers[place])
        if place not in self._own:
            self._own[place] = self._pieces.taken(self._numbers[place])
        return self._own[place]

    def __setitem__(self, key: K, piece: Any) -> None:
        assert self._own is not None
        self._own[self._places[key]] = piece

    def __delitem__(self, key: K) -> None:
        raise TypeError("a state always has all its pieces")

    def __iter__(self) -> Iterator[K]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
