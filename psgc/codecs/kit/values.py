"""Parameters of a kit codec, declared as class attributes: what they take, their default, their canonical text.

Owns reading and printing them. ``tau = Real(0.1, least=0, most=1)`` in a class makes ``codec.tau`` a checked float.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar, overload

from psgc.errors import CodecError

T = TypeVar("T")


class Value(Generic[T]):
    """One declared parameter. Instances of the codec hold what was read."""

    name = ""

    def __init__(self, default: T) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Value[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Value[T] | T:
        if instance is None:
            return self
        found: T = vars(instance)["_values"][self.name]
        return found

    @property
    def wanted(self) -> str:
        """The values that the parameter takes, in words, for error messages."""
        raise NotImplementedError

    def parse(self, text: str) -> T:
        """The value. Raises ValueError for what it does not take."""
        raise NotImplementedError

    def read(self, codec: str, text: str) -> T:
        """The value. Raises CodecError naming codec and parameter."""
        try:
            return self.parse(text)
        except ValueError:
            raise CodecError(f"codec {codec}: parameter {self.name} is {self.wanted}, not {text!r}") from None

    def write(self, value: T) -> str:
        """Canonical text, which reads back as the value."""
        return str(value)


class Whole(Value[int]):
    """A whole number."""

    def __init__(self, default: int, *, least: int, most: int) -> None:
        super().__init__(default)
        self._least, self._most = least, most

    @property
    def wanted(self) -> str:
        return f"a whole number from {self._least} to {self._most}"

    def parse(self, text: str) -> int:
        value = int(text) if text.isascii() and text.removeprefix("-").isdigit() else self._most + 1
        if not self._least <= value <= self._most:
            raise ValueError(text)
        return value


class Real(Value[float]):
    """A finite number."""

    def __init__(self, default: float, *, least: float, most: float) -> None:
        super().__init__(default)
        self._least, self._most = least, most

    @property
    def wanted(self) -> str:
        return f"a number from {self._least:g} to {self._most:g}"

    def parse(self, text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and self._least <= value <= self._most):
            raise ValueError(text)
        return value

    def write(self, value: float) -> str:
        return shortest(value)


class Choice(Value[str]):
    """One of several names; the first is the default."""

    def __init__(self, *words: str) -> None:
        super().__init__(words[0])
        self._words = words

    @property
    def wanted(self) -> str:
        return " or ".join(self._words)

    def parse(self, text: str) -> str:
        if text not in self._words:
            raise ValueError(text)
        return text


def declared(codec: type) -> dict[str, Value[Any]]:
    """The parameters that a class and its bases declare, by name."""
    found: dict[str, Value[Any]] = {}
    for base in reversed(codec.__mro__):
        found |= {name: value for name, value in vars(base).items() if isinstance(value, Value)}
    return found


def shortest(value: float) -> str:
    """The text of a number that reads as the same one: short where that is exact."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
