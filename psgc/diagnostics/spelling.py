"""Suggestions for misspelt names: the most similar known name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name most similar to ``word``, or "" if none is similar enough. cutoff: difflib's ratio, 1 for equal names."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's line: "; did you mean X?", or nothing."""
    meant = nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""
