"""Codes in blocks with a scale, on the GPU: `int8`, `int4`, `fp8`, `dithering` and `tbq`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psgc.codecs.backends import cuda_side
from psgc.device.codec import DeviceStream, stream_words
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, bits, status, tensor, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = ("zeros", "denormal", "small", "huge", "nothing", "nan", "inf")
CODECS = (
    "int8", "int8:ef=0", "int4", "int4:ef=0", "fp8", "fp8:ef=0", "fp8:format=e5m2", "fp8:format=e5m2,ef=0", "dithering", "dithering:k=1",
    "dithering:k=1,normalize=l2", "dithering:k=100,ef=1", "dithering:partition=natural", "dithering:k=1,partition=natural",
    "dithering:k=127,normalize=l2,partition=natural", "dithering:ef=1,k=20,partition=natural", "tbq", "tbq:tau=0.7", "int8:rotate=1",
    "int4:rotate=1", "int4:ef=0,rotate=1",
)  # fmt: skip


# A test for each codec, so that processes share them: on a GPU, what takes the time is compiling.
@pytest.mark.parametrize("text", CODECS)
def test_they_have_the_bytes_of_the_cpu(device: torch.device, text: str) -> None:
    number, pair = CODECS.index(text), Pair(text, device)
    for numel in (1 + number, 2177 + number):
        pair.check_all(values(numel, number), FLOATS[number % 3 :][:1], payloads=2 + number % 3)


@pytest.mark.parametrize("text", CODECS)
def test_they_have_the_bytes_of_the_cpu_for_values_at_the_edges(device: torch.device, text: str) -> None:
    number, pair = CODECS.index(text), Pair(text, device)
    for specials in (SPECIAL, SPECIAL[:-2]):  # with NaN and infinity, and without: a block of each kind
        x = np.concatenate([*(values(256, seed, special) for seed, special in enumerate(specials)), values(37, number)])
        pair.check_encode(x, FLOATS[number % 3], with_residual=False)
        pair.check_finish(x, 1 + number % 2)


@pytest.mark.parametrize("text", ["int8", "int4", "fp8"])
def test_eight_payloads_are_added_from_left_to_right(device: torch.device, text: str) -> None:
    pair = Pair(text, device)
    payloads = [pair.cpu_payload(values(2500, seed)) for seed in range(8)]
    pair.check_fold(payloads, 2500)
    assert pair.check_serve(pair, payloads, 2500, 8)
    assert not pair.check_serve(Pair("bf16", device), [Pair("bf16", device).cpu_payload(values(2500, 0))], 2500, 1)


def test_numbers_that_change_between_replays_are_read_from_the_device(device: torch.device) -> None:
    pair = Pair("int4:ef=0", device)
    x, out, state = values(900, 1), pair.out(900), status(device)
    words = torch.tensor(stream_words(STREAM), dtype=torch.int64, device=device)
    pair.side.encode(tensor(x, device), None, 1.0, DeviceStream(words), out, state)
    wanted = pair.cpu_payload(x)
    assert_same(out.cpu().numpy()[: wanted.size], wanted, "payload")
    pair, residual = Pair("int8", device), values(900, 99)
    old, rescale = tensor(residual, device), torch.tensor([RESCALE], device=device)
    payload = pair.check_encode(x, torch.float32)
    out = pair.out(900)
    pair.side.encode(tensor(x, device), old, rescale, STREAM, out, state)
    assert_same(out.cpu().numpy()[: payload.size], payload, "payload")
    pair.side.commit(out[: payload.size], 900, tensor(x, device), old, rescale)
    pair.codec.commit(payload, 900, 0, 900, x, residual, RESCALE)
    assert_same(bits(old), residual.view("uint32"), "residual")


def test_bytes_to_be_moved_are_counted(device: torch.device) -> None:
    pair = Pair("int8", device)
    side, payload = cuda_side(pair.codec), pair.codec.payload_bound(1 << 20)
    assert side.moved_bytes("encode", 1 << 20, item_bytes=2) == (6 << 20) + payload
    assert side.moved_bytes("commit", 1 << 20) == (12 << 20) + payload
    assert side.moved_bytes("fold_and_finish", 1 << 20, payloads=4) == (8 << 20) + 5 * payload
