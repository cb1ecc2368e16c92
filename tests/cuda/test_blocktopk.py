"""`blocktopk` on the GPU, held against the CPU's bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cuda.against_cpu import STREAM, Pair, status, tensor, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def test_every_operation_has_the_bytes_of_the_cpu(device: torch.device) -> None:
    for text, sizes in (("blocktopk:k=0.3,block=7", (1, 50)), ("blocktopk:k=2", (700,)), ("blocktopk:k=2,block=5000", (12345,))):
        pair = Pair(text, device)
        for numel in sizes:
            pair.check_all(values(numel, numel), FLOATS if numel == 50 else FLOATS[:1], payloads=2 if numel < 1000 else 1)


def test_blocks_of_equal_tiny_or_huge_elements_have_the_bytes_of_the_cpu(device: torch.device) -> None:
    pair = Pair("blocktopk:k=0.3,block=16,ef=0", device)
    for special in ("zeros", "denormal", "huge"):
        pair.check_encode(values(200, 1, special), torch.float32)
    pair.check_encode(np.full(200, -2.0, np.float32), torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which computes with NumPy
def test_nan_and_infinity_are_flagged(device: torch.device) -> None:
    pair = Pair("blocktopk:k=0.3,block=16", device)
    for special in ("nan", "inf"):
        out, state = pair.out(100), status(device)
        pair.side.encode(tensor(values(100, 1, special), device), None, 1.0, STREAM, out, state, pair.scratch(100))
        flags, size = state.tolist()
        assert flags == 1
        pair.codec.validate(out.cpu().numpy()[:size], 100)
