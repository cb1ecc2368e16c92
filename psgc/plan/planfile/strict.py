"""Reads JSON from untrusted sources: of bounded size and depth, without duplicate keys, NaN or absurdly large numbers.

Owns these limits. Does not know what the fields mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.documents import shown
from psgc.processes.collector import paused_collector

MAX_BYTES: Final = 16 << 20  # a plan of 10,000 tensors in 60,000 parts takes half of that
MAX_DEPTH: Final = 32
MAX_CONTAINERS: Final = 1 << 20  # lists and objects; a plan's transfers are lists of three
MAX_COMMAS: Final = 1 << 22
MAX_DIGITS: Final = 30  # of a whole number, because int() takes time quadratic in its digits


def read_strictly(path: Path, whose: str) -> Any:
    """The file's contents. Raises UsageError, in one line that begins with ``whose``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{whose}: {error.strerror}") from None
    except ValueError as error:  # a path with a null character
        raise UsageError(f"{whose}: {error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{whose}: it is longer than {MAX_BYTES >> 20} MiB, the most that a plan may be")
    return parse_strictly(data, whose)


def parse_strictly(data: bytes | str, whose: str) -> Any:
    """The JSON in ``data``. Raises UsageError, as ``read_strictly`` does. Whatever takes long to parse is counted first, so a hostile file takes
    seconds at most."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    for count, what, most in (
        (raw.count(b"[") + raw.count(b"{"), "lists and objects", MAX_CONTAINERS), (raw.count(b","), "commas", MAX_COMMAS)
    ):  # fmt: skip
        if count > most:
            raise UsageError(f"{whose}: it has {count:,} {what}, and {most:,} are the most that a plan may have")
    with paused_collector():  # parsing makes millions of lists
        return _parse(data, whose)


def _parse(data: bytes | str, whose: str) -> Any:
    try:
        found = json.loads(data, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise UsageError(f"{whose}: nested too deeply to be read") from None
    except ValueError as error:  # from json, from text that is not UTF-8, and from the functions below
        raise UsageError(f"{whose}: not valid JSON: {error}") from None
    _check_depth(found, whose)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"field {shown(twice)} is there twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:MAX_DIGITS]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits is too large")
    return int(text)


def _check_depth(document: Any, whose: str) -> None:
    """Raise UsageError if the document is nested too deeply. Code that reads it, or shows it in an error, may recurse."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise UsageError(f"{whose}: nested too deeply: {MAX_DEPTH} levels are the most that a plan may have")
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
