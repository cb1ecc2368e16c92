"""`randomk` on the GPU, held against the CPU's bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from psgc.codecs.randomk import shared_stream
from psgc.device.codec import DeviceStream, stream_words
from tests.cuda.against_cpu import STREAM, Pair, status, tensor, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, which computes with NumPy
def test_every_operation_has_the_bytes_of_the_cpu(device: torch.device) -> None:
    for text in ("randomk:k=0.1", "randomk:k=0.3,ef=0"):
        pair = Pair(text, device)
        for numel in (1, 130, 3000):
            pair.check_all(values(numel, numel), FLOATS if numel == 130 else FLOATS[:1], payloads=3)
        for special in ("zeros", "denormal", "huge"):
            pair.check_encode(values(200, 1, special), torch.float32)


def test_the_answer_to_randomk_is_not_scaled_again(device: torch.device) -> None:
    pair = Pair("randomk:k=0.3,ef=0", device)
    pair.codec = pair.codec.answering(pair.codec)
    pair.side = type(pair.side)(pair.codec)
    pair.check_finish(values(200, 1), 3)


def test_places_depend_on_seed_step_and_first_element_but_not_on_the_rank(device: torch.device) -> None:
    pair, x = Pair("randomk:k=0.1", device), values(200, 1)
    found = [
        pair.check_encode(x, torch.float32, stream).tobytes()
        for stream in (STREAM, replace(STREAM, rank=9), replace(STREAM, seed=6), replace(STREAM, step=4), replace(STREAM, first=4096))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_a_stream_on_the_device_draws_the_same_places(device: torch.device) -> None:
    pair, x = Pair("randomk:k=0.1,ef=0", device), values(200, 1)
    words = torch.tensor(stream_words(shared_stream(STREAM)), dtype=torch.int64, device=device)
    out, state = pair.out(200), status(device)
    pair.side.encode(tensor(x, device), None, 1.0, DeviceStream(words), out, state)
    assert out.cpu().numpy()[: int(state[1])].tobytes() == pair.cpu_payload(x).tobytes()


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which computes with NumPy
def test_nan_and_infinity_are_flagged_wherever_they_are(device: torch.device) -> None:
    pair = Pair("randomk:k=0.01", device)
    for place in (0, 99):
        x = values(100, 1)
        x[place] = np.float32("nan")
        out, state = pair.out(100), status(device)
        pair.side.encode(tensor(x, device), None, 1.0, STREAM, out, state)
        assert state.tolist() == [1, pair.codec.payload_bound(100)]
