"""Levels of quality: how much a choice that psgc makes may lose; and how ``auto`` is asked for one. ``quality`` judges codecs by them."""

from __future__ import annotations

from typing import Final

from psgc.errors import UsageError

EXACT, SAFE, FAST = "exact", "safe", "fast"
LEVELS: Final = (EXACT, SAFE, FAST)
AUTO: Final = "auto"
PARAMETER: Final = "quality="  # as in "auto:quality=fast"


def asks_auto(text: str) -> bool:
    """Whether the text is ``auto``, with a level or without."""
    return text.partition(":")[0] == AUTO


def level_of(text: str, default: str) -> str:
    """The level that ``auto`` or ``auto:quality=LEVEL`` asks for. Raises UsageError for anything else."""
    _, colon, parameter = text.partition(":")
    level = parameter.removeprefix(PARAMETER)
    if colon and (level == parameter or level not in LEVELS):
        raise UsageError(f"{text!r}: auto takes one parameter, {PARAMETER}{', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return level or default
