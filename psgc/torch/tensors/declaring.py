"""What psgc declares of tensors: their specs, and declarations with the sizes that the session's configuration sets."""

from __future__ import annotations

from typing import Any

import torch

from psgc.layout import Declaration, TensorSpec
from psgc.layout.records import LayoutKind
from psgc.torch.tensors.buffers import dtype_name, shape_of
from psgc.worker.session import Session


def plain_name(name: str) -> str:
    """Of a parameter or module, without what torch.compile and torch's checkpoint_wrapper put into it: with them or without, it is the same model's."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def spec_of(tensor: torch.Tensor, name: str, what: str, group: int = 0) -> TensorSpec:
    """As it travels: of a complex tensor, its real and imaginary parts. Raises UsageError, naming ``what``, for what psgc does not carry, and for what is no
    tensor."""
    dtype = dtype_name(tensor, what)
    return TensorSpec(name, shape_of(tensor), dtype, group)


def declaration(
    session: Session, name: str, kind: LayoutKind, tensors: tuple[TensorSpec, ...], codec: str, mean: bool, **more: Any
) -> Declaration:
    """more: the declaration's other fields."""
    config = session.config
    return Declaration(
        name, kind, tensors, codec, mean, part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes,
        min_compress_bytes=config.min_compress_bytes, **more,
    )  # fmt: skip
