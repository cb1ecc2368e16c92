"""`topk` on the GPU: exact, sampled and MSTop-K, held against the CPU's bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from psgc.errors import CodecError
from tests.cuda.against_cpu import STREAM, Pair, payload_tensor, status, tensor, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SELECTORS = ("exact", "sampled", "mstopk")


@pytest.mark.parametrize("select", SELECTORS)
def test_every_operation_has_the_bytes_of_the_cpu(device: torch.device, select: str) -> None:
    pair = Pair(f"topk:k=0.1,select={select}", device)
    for numel, dtypes in ((1, FLOATS[:1]), (129, FLOATS[1:2] if select != "exact" else FLOATS), (4097, FLOATS[1:2])):
        pair.check_all(values(numel, numel), dtypes, payloads=2 if numel < 4097 else 1)


def test_parts_with_equal_tiny_or_huge_elements_have_the_bytes_of_the_cpu(device: torch.device) -> None:
    for select in SELECTORS:
        pair, bare = Pair(f"topk:k=0.05,select={select}", device), Pair(f"topk:k=0.05,select={select},ef=0", device)
        for special in ("zeros", "denormal", "huge"):
            pair.check_encode(values(300, 1, special), torch.float32)
        for constant in (0.0, -1.5):  # which are sent is decided by their places alone
            bare.check_encode(np.full(300, constant, np.float32), torch.float32)
    bare.check_encode(np.full(4500, 2.5, np.float32), torch.float32)


def test_where_the_sample_misleads_the_whole_part_is_searched(device: torch.device) -> None:
    """The sample sees none of the large elements, or hardly any others."""
    from psgc.codecs.sparsify.largest import reference_sample

    numel, k = 5000, 250
    seen = reference_sample(numel, k)
    unseen = np.setdiff1d(np.arange(numel), seen)
    for select in SELECTORS:
        pair = Pair(f"topk:k={k},ef=0,select={select}", device)
        for large in (unseen, seen):
            x = values(numel, 3) * np.float32(1e-3)
            x[large] += np.float32(1e4)
            pair.check_encode(x, torch.float32)


def test_a_part_of_which_most_is_sent_travels_as_a_whole(device: torch.device) -> None:
    for text in ("topk:k=0.99", "topk:k=0.6", "topk:k=0.5,select=sampled"):
        pair = Pair(text, device)
        for numel in (5, 300):
            x = values(numel, 2, "zeros")
            payload = pair.check_encode(x, torch.float32)
            pair.check_decode(payload, numel, torch.float16)
            if pair.codec.feedback:
                pair.check_commit(payload, x, torch.float32)
            pair.check_fold([payload, payload], numel)
            pair.check_finish(x, 2)


def test_steps_of_a_warm_up_send_as_many_elements_as_on_the_cpu(device: torch.device) -> None:
    pair = Pair("topk:warmup=8", device)
    for step in (1, 8, 9):
        payload = pair.check_encode(values(600, 5), torch.float32, replace(STREAM, step=step))
        pair.check_decode(payload, 600, torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which computes with NumPy
def test_nan_and_infinity_are_flagged_and_their_payload_is_well_formed(device: torch.device) -> None:
    for select in SELECTORS:
        pair = Pair(f"topk:k=0.05,select={select}", device)
        for special in ("nan", "inf"):
            x, out, state = values(700, 1, special), pair.out(700), status(device)
            pair.side.encode(tensor(x, device), None, 1.0, STREAM, out, state, pair.scratch(700))
            flags, size = state.tolist()
            assert flags == 1
            pair.codec.validate(out.cpu().numpy()[:size], 700)


def test_a_rescale_on_the_device_and_one_on_the_host_give_the_same_bytes(device: torch.device) -> None:
    pair, x, found = Pair("topk:k=0.1", device), tensor(values(300, 1), device), []
    for rescale in (0.7, torch.tensor([0.7], device=device)):
        out, state = pair.out(300), status(device)
        pair.side.encode(x, tensor(values(300, 2), device), rescale, STREAM, out, state, pair.scratch(300))
        found.append(out.cpu().numpy()[: int(state[1])].tobytes())
    assert found[0] == found[1]


def test_too_little_scratch_is_refused(device: torch.device) -> None:
    pair = Pair("topk", device)
    with pytest.raises(CodecError, match=r"^codec topk: scratch has 0 bytes; \d+ expected"):
        pair.side.encode(tensor(values(300, 1), device), None, 1.0, STREAM, pair.out(300), status(device), None)
    with pytest.raises(CodecError, match=r"^codec topk: payload begins at no multiple of 16 bytes"):
        pair.side.decode(payload_tensor(pair.cpu_payload(values(300, 1)), device)[4:], 300, torch.empty(300, device=device))
