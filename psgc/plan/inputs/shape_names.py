"""Names of gradients that a trace tells only the shapes of: the shape, and how many gradients of that shape were ready before. ``500x300.0``, ``scalar.2``."""

from __future__ import annotations

import re
from typing import Final

Shape = tuple[int, ...]
_NAME: Final = re.compile(r"(scalar|[0-9]+(?:x[0-9]+)*)\.([0-9]+)")


def name_of(shape: Shape, number: int) -> str:
    """The name of the gradient of this shape before which ``number`` of the same shape were ready."""
    return f"{shape_text(shape)}.{number}"


def shape_text(shape: Shape) -> str:
    """``700x500``; ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def shape_in(name: str) -> tuple[Shape, int] | None:
    """The shape and the number in such a name; None if it is no such name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (() if found[1] == "scalar" else tuple(map(int, found[1].split("x"))), int(found[2]))
