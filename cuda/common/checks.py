"""What is checked of a GPU codec's arguments before a kernel gets their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import Codec
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.errors import CodecError

FLOAT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
PAYLOAD_ALIGNMENT: Final = 16  # bytes; kernels load 16 at once


def check_part(codec: Codec, device: torch.device, numel: int, **tensors: torch.Tensor | None) -> None:
    """Raise CodecError, naming the tensor, unless each is contiguous, on ``device``, and has ``numel`` elements of a dtype that its name allows:
    ``grad`` and ``out`` are floats, all others float32. None is passed over."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        allowed = FLOAT_DTYPES if name in ("grad", "out") else (torch.float32,)
        check_place(codec, name, tensor, device)
        if tensor.dtype not in allowed:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise CodecError(f"codec {codec.name}: {name} is {str(tensor.dtype).removeprefix('torch.')}; {wanted} expected")
        if tensor.numel() != numel:
            raise CodecError(f"codec {codec.name}: {name} has {tensor.numel()} elements, the part has {numel}")


def check_place(codec: Codec, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise CodecError unless the tensor is contiguous and on ``device``."""
    if tensor.device != device:
        raise CodecError(f"codec {codec.name}: {name} is on {tensor.device}, the other tensors are on {device}; move it there")
    if not tensor.is_contiguous():
        raise CodecError(f"codec {codec.name}: {name} of shape {list(tensor.shape)} is not contiguous")


def check_payload(codec: Codec, device: torch.device, numel: int, payload: torch.Tensor, name: str = "payload") -> None:
    """Raise CodecError unless the payload is uint8, aligned, and as long as ``payload_bound`` says, or longer."""
    check_place(codec, name, payload, device)
    bound = codec.payload_bound(numel)
    if payload.dtype != torch.uint8 or payload.numel() < (bound if codec.fixed_size else 1):
        raise CodecError(f"codec {codec.name}: {name} of {numel} elements is uint8 [{bound}], not {payload.dtype} {list(payload.shape)}")
    if payload.data_ptr() % PAYLOAD_ALIGNMENT:
        raise CodecError(f"codec {codec.name}: {name} begins at no multiple of {PAYLOAD_ALIGNMENT} bytes")


def check_payloads(codec: Codec, device: torch.device, numel: int, payloads: Sequence[torch.Tensor]) -> None:
    """Raise CodecError unless there are 1 to 8 payloads, all of which ``check_payload`` passes."""
    if not 1 <= len(payloads) <= MAX_PAYLOADS:
        raise CodecError(f"codec {codec.name}: 1 to {MAX_PAYLOADS} payloads are added at once, not {len(payloads)}")
    for number, payload in enumerate(payloads):
        check_payload(codec, device, numel, payload, f"payload {number}")


def check_status(codec: Codec, device: torch.device, status: torch.Tensor) -> None:
    """Raise CodecError unless it is int64 [2] on the device."""
    check_place(codec, "status", status, device)
    if status.dtype != torch.int64 or status.numel() != 2:
        raise CodecError(f"codec {codec.name}: status is int64 [2], not {status.dtype} {list(status.shape)}")
