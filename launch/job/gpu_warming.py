"""The kernels that a job launches for a codec or scheme, launched once each ahead of the job: Triton compiles them, and keeps them on disk.

Owns what jobs launch: each operation of the two codecs of a pair, or the rounds of a scheme with a state, for gradients of the dtypes that training has. Of
what is computed nothing is used. Triton compiles for one number of payloads that are summed at a time; jobs over servers sum none on GPUs, and collectives
those of a group's ranks: of these numbers the powers of two are compiled, the others when they are first needed.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from psgc.codecs.backends import cuda_side, cuda_state
from psgc.codecs.codec import Stream
from psgc.codecs.registry import parse_scheme
from psgc.codecs.scheme import BucketContext, PairScheme
from psgc.device.codec import Decoding, DeviceCodec, Encoding
from psgc.device.state import DeviceState
from psgc.errors import CodecError

DTYPES: Final = ("float32", "bfloat16")
SHAPES: Final = ((90, 111), (5,))
NUMEL: Final = 90 * 111 + 5
SUMMED: Final = (1, 2, 4, 8)
_STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)


def warm(text: str, device: torch.device) -> bool:
    """Launch the kernels of a codec, a pair or a scheme on the device. Returns False, and launches nothing, where there are none. Raises CodecError."""
    found = False
    for dtype in DTYPES:
        try:
            scheme = parse_scheme(text, BucketContext(dtype, workers=2, shapes=SHAPES))
        except CodecError:
            if dtype == DTYPES[0]:
                raise
            continue  # it does not carry this dtype
        if isinstance(scheme, PairScheme):
            push, pull = cuda_side(scheme.pair.push), cuda_side(scheme.pair.pull)
            if push is not None and pull is not None:
                for side in (push, pull):
                    _use_codec(side, getattr(torch, dtype), device)
                found = True
        else:
            state = cuda_state(scheme, NUMEL, device)
            if state is not None:
                _use_state(state, getattr(torch, dtype), scheme.feedback, device)
                found = True
    return found


def _use_codec(side: DeviceCodec, dtype: torch.dtype, device: torch.device) -> None:
    """Both as the codec that pushes and as the one that answers. What is decoded are zeros, which are a payload of every codec."""
    codec = side.codec

    def floats(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(NUMEL, dtype=dtype, device=device)

    def residual() -> Any:
        return floats() if codec.feedback else None

    out, status = _bytes(codec.payload_bound(NUMEL), device), torch.zeros(2, dtype=torch.int64, device=device)
    payload, scratch = _bytes(codec.payload_bound(NUMEL), device), _bytes(side.scratch_bytes(NUMEL), device)
    side.encode(floats(dtype), residual(), 1.0, _STREAM, out, status, scratch)
    side.encode_many([Encoding(floats(dtype), residual(), 1.0, _STREAM, _bytes(out.numel(), device), status, scratch) for _ in range(2)])
    side.decode(payload, NUMEL, floats(dtype))
    side.decode_many([Decoding([payload], NUMEL, floats(dtype)) for _ in range(2)])
    if codec.feedback:
        side.commit(payload, NUMEL, floats(dtype), floats(), 1.0)
        side.decode_many([Decoding([payload], NUMEL, floats(), "commit", floats(dtype), 1.0) for _ in range(2)])
    side.fold([payload], NUMEL, floats(), False)
    for count in SUMMED:
        side.fold([payload] * count, NUMEL, floats(), True)
    side.finish(floats(), NUMEL, 1, residual(), residual(), 1.0, _STREAM, out, status, scratch)


def _use_state(state: DeviceState, dtype: torch.dtype, feedback: bool, device: torch.device) -> None:
    grad, status = torch.zeros(NUMEL, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    residual = torch.zeros(NUMEL, device=device) if feedback else None
    scratch = _bytes(state.scratch_bytes(), device)
    sent = [_bytes(round_.pair.push.payload_bound(round_.numel), device) for round_ in state.rounds]
    answers = [_bytes(round_.pair.pull.payload_bound(round_.numel), device) for round_ in state.rounds]
    for index, out in enumerate(sent):
        state.encode(index, grad, residual, 1.0, _STREAM, out, status, scratch)
        if index + 1 < len(sent):
            state.take(index, answers[index])
    state.apply([answers[-1]], sent, grad, residual, 1.0)
    if residual is not None:
        state.add_back(sent, residual)


def _bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(max(count, 16), dtype=torch.uint8, device=device)
