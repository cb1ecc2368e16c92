"""Rules: a codec for each parameter, by its name and what it is; and the buckets that gradients are fused into by a rule.

A rule is a function of name and parameter, or a mapping of patterns (``{"*.bias": "none", "*": "int8"}``), of which the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

import torch

from psgc.errors import CodecError, UsageError
from psgc.layout import ITEM_BYTES, BucketSpec, TensorSpec
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
    dtype = str(parameter.dtype).removeprefix("torch.")
    given = rule(name, parameter)
    try:
        return codec_text(given, dtype)
    except (UsageError, CodecError) as error:
        raise type(error)(f"parameter {name!r}: the rule's {error}") from None


def buckets_by_rule(rule: Rule, specs: Sequence[TensorSpec], parameters: Sequence[torch.Tensor], fuse_bytes: int) -> tuple[BucketSpec, ...]:
    """Gradients of one codec, dtype and parameter group fused in the reverse order of ``specs``, in which backward makes them ready, nearly; as all ranks
    declare the same buckets, no rank's own order counts. specs, parameters: of the same tensors."""
    buckets: list[tuple[str, list[int]]] = []
    open_: dict[tuple[str, str, int], tuple[list[int], int]] = {}  # the bucket that is being filled, and its bytes so far
    for index in reversed(range(len(specs))):
        spec = specs[index]
        nbytes = spec.numel * ITEM_BYTES[spec.dtype]
        if not nbytes:
            continue
        codec = codec_by_rule(rule, spec.name, parameters[index])
        kind = codec, spec.dtype, spec.group
        members, filled = open_.get(kind, ([], 0))
        if not members or filled + nbytes > fuse_bytes:
            members, filled = [], 0
            buckets.append((codec, members))
        members.append(index)
        open_[kind] = members, filled + nbytes
    return tuple(BucketSpec(tuple(members), codec, -number) for number, (codec, members) in enumerate(buckets))
