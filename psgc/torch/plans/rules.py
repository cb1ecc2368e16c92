"""Rules: a codec for each parameter, by its name and what it is.

A rule is a function of name and parameter, or a mapping of patterns (``{"*.bias": "none", "*": "int8"}``), of which the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

import torch

from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.buffers import dtype_name
from psgc.torch.tensors.codec_text import codec_text

Rule: TypeAlias = Callable[[str, torch.Tensor], Any]
_PATTERN_LETTERS: Final = "*?[."  # of patterns of parameters' names; BytePS's options have none of them


def rule_of(given: Any) -> Rule | None:
    """The rule that ``given`` is; None where it is none, but a codec or BytePS's options."""
    if isinstance(given, Mapping):
        patterns = {str(name): codec for name, codec in given.items()}
        if not any(letter in name for name in patterns for letter in _PATTERN_LETTERS):
            return None
        return lambda name, _: _first_match(patterns, name)
    is_codec = isinstance(given, str | type) or hasattr(given, "canonical") or hasattr(given, "compress")
    return given if callable(given) and not is_codec else None


def _first_match(patterns: Mapping[str, Any], name: str) -> Any:
    for pattern, codec in patterns.items():
        if fnmatchcase(name, pattern):
            return codec
    raise UsageError(f"parameter {name!r}: none of the patterns {', '.join(map(repr, patterns))} fits; add '*': 'none' as the last one")


def codec_by_rule(rule: Rule, name: str, parameter: torch.Tensor) -> str:
    """The codec's canonical text. None: uncompressed. Raises CodecError and UsageError naming the parameter."""
    dtype = dtype_name(parameter, f"parameter {name!r}")
    given = rule(name, parameter)
    try:
        return codec_text(given, dtype)
    except (UsageError, CodecError) as error:
        raise type(error)(f"parameter {name!r}: the rule's {error}") from None
