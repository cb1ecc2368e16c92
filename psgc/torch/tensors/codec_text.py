"""The codec that a call or an optimizer asks for, as canonical text, checked against the dtypes that it is to carry."""

from __future__ import annotations

import functools

import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.buffers import dtype_name


def codec_text(compression: str | None, dtype: str) -> str:
    """The codec's canonical text. Raises CodecError for an unknown codec, or one that cannot carry ``dtype``."""
    if compression is None:
        return "none"
    if not isinstance(compression, str):
        raise UsageError(f"compression is {compression!r}, expected codec text such as 'int8', or None")
    return _canonical(compression, dtype)


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
