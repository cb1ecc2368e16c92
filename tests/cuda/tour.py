"""Calls every operation of every GPU side once for each kind of arguments that kernels are compiled for. `ahead.py` records the launches.

The numbers do not matter, only types, lengths and parameters: nothing is computed. A kernel that is not reached is reported by `ahead.py`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from psgc.codecs.backends import cuda_side, cuda_state
from psgc.codecs.codec import FLOATS, Stream
from psgc.codecs.registry import parse_codec, parse_scheme
from psgc.codecs.scheme import BucketContext
from psgc.device.codec import Decoding, Encoding

NUMEL: Final = 20000  # above what a sparse codec looks at as a whole
STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)
# One for each kernel or constant that differs.
TEXTS: Final = (
    "none", "bf16", "fp16", "int8", "int8:ef=0", "int8:rotate=1", "int4", "int4:ef=0", "int4:rotate=1", "fp8", "fp8:ef=0", "fp8:format=e5m2",
    "dithering", "dithering:ef=1", "dithering:k=1", "dithering:k=127", "dithering:normalize=l2", "dithering:partition=natural", "tbq",
    "onebit", "onebit:ef=0,scale=unit",
    "topk:k=0.01", "topk:k=0.6", "topk:k=0.01,select=sampled", "topk:k=0.01,select=mstopk",
    "blocktopk", "blocktopk:block=5000,k=2", "randomk", "randomk:ef=0",
)  # fmt: skip
# One for each kernel or constant of states.
SCHEMES: Final = (
    "int8:momentum=nesterov", "int8:clip=1", "int8:momentum=nesterov,clip=1", "randomk:momentum=dgc", "randomk:momentum=dgc,clip=1", "shared",
    "shared:ef=0",
)  # fmt: skip


def tour() -> None:
    """Launch everything."""
    for text in TEXTS:
        for dtype in ("float32", "bfloat16"):
            operations(text, dtype)
    powersgd()
    for text in SCHEMES:
        for dtype in (torch.float32, torch.bfloat16):
            steps(text, dtype)


def steps(text: str, dtype: torch.dtype) -> None:
    """The steps of one scheme with state, for gradients of this dtype."""
    scheme, status = parse_scheme(text, BucketContext("float32", 2)), torch.zeros(2, dtype=torch.int64)
    state, grad = cuda_state(scheme, NUMEL, torch.device("cpu")), torch.zeros(NUMEL, dtype=dtype)
    sent = [torch.zeros(max(16, round_.pair.push.payload_bound(round_.numel)), dtype=torch.uint8) for round_ in state.rounds]
    last = state.rounds[-1]
    answer = torch.zeros(last.pair.pull.payload_bound(last.numel), dtype=torch.uint8)
    for residual in (torch.zeros(NUMEL), None):
        for index, out in enumerate(sent):
            state.encode(index, grad, residual, 0.5, STREAM, out, status, torch.zeros(16, dtype=torch.uint8))
        state.apply([answer], sent, grad, residual, 0.5)
    state.add_back(sent, torch.zeros(NUMEL))


def powersgd() -> None:
    """Both rounds of a step."""
    scheme, status = parse_scheme("powersgd", BucketContext("float32", shapes=((100, 90), (5,)))), torch.zeros(2, dtype=torch.int64)
    state, grad, residual = cuda_state(scheme, 9005, torch.device("cpu")), torch.zeros(9005), torch.zeros(9005)
    sent = [torch.zeros(4 * round_.numel, dtype=torch.uint8) for round_ in state.rounds]
    for index, out in enumerate(sent):
        state.encode(index, grad, residual, 0.5, STREAM, out, status)
    state.take(0, sent[0])
    state.apply([sent[1]], sent, grad, residual, 0.5)
    state.add_back(sent, residual)


def operations(text: str, dtype: str) -> None:
    """Every operation of one codec, for gradients of this dtype."""
    codec = parse_codec(text, dtype)
    side, items = cuda_side(codec), getattr(torch, dtype)
    payload, status = torch.zeros(codec.payload_bound(NUMEL) + 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    scratch = torch.zeros(side.scratch_bytes(NUMEL) or 16, dtype=torch.uint8)

    def part() -> torch.Tensor:
        return torch.zeros(NUMEL, dtype=items)

    def floats() -> torch.Tensor:
        return torch.zeros(NUMEL)

    def residual() -> Any:
        return floats() if codec.feedback else None

    side.encode(part(), residual(), 0.5, STREAM, payload, status, scratch)
    if codec.dtypes == FLOATS:
        side.encode_many([Encoding(part(), residual(), 0.5, STREAM, payload, status, scratch)])
    side.decode(payload, NUMEL, part())
    side.decode_many([Decoding([payload], NUMEL, part())])
    if codec.feedback:
        side.decode_many([Decoding([payload], NUMEL, floats(), "commit", part(), 0.5)])
        side.commit(payload, NUMEL, part(), floats(), 0.5)
    if dtype == "float32":
        for count, fresh in ((1, True), (2, False), (8, True)):
            side.fold([payload] * count, NUMEL, floats(), fresh)
            side.decode_many([Decoding([payload] * count, NUMEL, floats(), "decode" if fresh else "add")])
            side.fold_and_finish(codec, [payload] * count, NUMEL, 2, residual(), residual(), 0.5, STREAM, payload, status, scratch)
        side.finish(floats(), NUMEL, 2, residual(), residual(), 0.5, STREAM, payload, status, scratch)
