"""The codec that a call or an optimizer asks for, as canonical text, checked against the dtypes that it is to carry.

A codec is asked for by its text, as an object (what ``parse_codec`` returns), by BytePS's options, or as a compressor (``compressors.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.buffers import dtype_name
from psgc.torch.tensors.byteps_options import options_text
from psgc.torch.tensors.compressors import codec_of, is_compressor

# What names one codec: its text, an object that has it, BytePS's options, or None for the default.
CodecGiven: TypeAlias = str | Mapping[str, Any] | Any | None


def codec_text(compression: CodecGiven, dtype: str) -> str:
    """The codec's canonical text. Raises CodecError for an unknown codec or option, or a codec that cannot carry ``dtype``."""
    return _canonical(given_text(compression), dtype)


def given_text(compression: CodecGiven) -> str:
    """The codec's text as it was given. Raises UsageError for what names no codec; CodecError for wrong options."""
    if compression is None:
        return "none"
    if isinstance(compression, str):
        return compression
    if isinstance(compression, Mapping):
        return options_text(compression)
    text = vars(compression).get("canonical") if isinstance(compression, type) else getattr(compression, "canonical", None)
    if isinstance(text, str):
        return text
    if is_compressor(compression):
        return codec_of(compression)
    raise UsageError(
        f"compression is {compression!r}, expected codec text such as 'int8', BytePS's options, a codec, a class with compress and decompress, or None"
    )


@functools.lru_cache(maxsize=256)
def _canonical(compression: str, dtype: str) -> str:
    return parse_scheme(compression, BucketContext(dtype)).canonical


def check_carries(codec: str, parameter: torch.Tensor, name: str) -> None:
    """Raise CodecError, naming the parameter, if the codec cannot carry its dtype."""
    dtype = dtype_name(parameter, f"parameter {name!r}")
    try:
        codec_text(codec, dtype)
    except CodecError as error:
        raise CodecError(f"parameter {name!r}: {error}") from None
