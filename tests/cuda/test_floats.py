"""`none`, `bf16` and `fp16` on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psgc.codecs.backends import cuda_side
from psgc.codecs.codec import DTYPES
from psgc.codecs.registry import parse_codec
from psgc.errors import CodecError
from tests.cuda.against_cpu import STREAM, Pair, assert_same, payload_tensor, status, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def test_casts_have_the_bytes_of_the_cpu(device: torch.device) -> None:
    for text in ("bf16", "fp16"):
        pair = Pair(text, device)
        for numel in (1, 7, 2048, 5000):
            pair.check_all(values(numel, numel), FLOATS, payloads=3)
        for special in ("zeros", "denormal", "huge", "nan", "inf"):
            pair.check_all(values(300, 4, special), FLOATS)


def test_parts_of_floats_travel_uncompressed_and_add_up_as_on_the_cpu(device: torch.device) -> None:
    pair = Pair("none", device)
    for numel in (1, 4097):
        x = values(numel, numel, "denormal")
        sources = [pair.check_encode(x, torch.float32), *(pair.cpu_payload(values(numel, seed)) for seed in range(7))]
        for dtype in FLOATS:
            pair.check_decode(sources[0], numel, dtype)
        for count in (1, 5, 8):
            pair.check_fold(sources[:count], numel)
            assert pair.check_serve(pair, sources[:count], numel, count)
        assert Pair("bf16", device).check_serve(pair, sources[:2], numel, 3)
        pair.check_finish(x, 3)


def test_a_part_of_any_dtype_travels_uncompressed(device: torch.device) -> None:
    generator = np.random.default_rng(1)
    for dtype, items in DTYPES.items():
        codec = parse_codec("none", dtype)
        side = cuda_side(codec)
        raw = [generator.integers(0, 2 if dtype == "bool" else 100, 33).astype(items) for _ in range(3)]
        raw = [(r << 7).astype(items) for r in raw] if dtype == "bfloat16" else raw
        payloads = [r.view(np.uint8) for r in raw]
        sources = [payload_tensor(payload, device) for payload in payloads]
        out, state = torch.empty(264, dtype=torch.uint8, device=device), status(device)
        side.encode(sources[0].view(getattr(torch, dtype)), None, 1.0, STREAM, out, state)
        size = codec.payload_bound(33)
        assert state.tolist() == [0, size]
        assert_same(out.cpu().numpy()[:size], payloads[0], dtype)
        back = torch.empty(33, dtype=getattr(torch, dtype), device=device)
        side.decode(sources[1], 33, back)
        assert_same(back.cpu().view(torch.uint8).numpy(), payloads[1], dtype)
        acc, sums = (
            np.zeros(33, codec.acc_dtype),
            torch.zeros(33, dtype=torch.from_numpy(np.zeros(1, codec.acc_dtype)).dtype, device=device),
        )
        for fresh in (True, False):
            codec.fold(payloads, 33, 0, 33, acc, fresh)
            side.fold(sources, 33, sums, fresh)
            assert_same(sums.cpu().numpy(), acc, dtype)
        wanted = np.zeros(size, np.uint8)
        codec.finish(acc, 33, 0, 33, 7, None, None, 1.0, STREAM, wanted)
        side.finish(sums, 33, 7, None, None, 1.0, STREAM, out, state)
        assert_same(out.cpu().numpy()[:size], wanted, dtype)


def test_an_unfit_tensor_is_named(device: torch.device) -> None:
    side, state = cuda_side(parse_codec("bf16")), status(device)
    grad, out = torch.zeros(10, device=device), torch.zeros(32, dtype=torch.uint8, device=device)
    for arguments, said in (
        ((grad.double(), None, 1.0, STREAM, out, state), "grad is float64; float32, bfloat16, float16 expected"),
        ((grad[::2], None, 1.0, STREAM, out, state), r"grad of shape \[5\] is not contiguous"),
        ((grad, None, 1.0, STREAM, out[:8], state), r"out of 10 elements is uint8 \[20\], not torch.uint8 \[8\]"),
        ((grad, None, 1.0, STREAM, out[4:], state), "out begins at no multiple of 16 bytes"),
        ((grad, None, 1.0, STREAM, out, state[:1]), r"status is int64 \[2\]"),
        ((grad.to("meta"), None, 1.0, STREAM, out, state), "grad is on meta, the other tensors are on "),
    ):
        with pytest.raises(CodecError, match=f"^codec bf16: {said}"):
            side.encode(*arguments)
