"""Payloads that travel among GPUs: each behind its status, in memory of its bound, with anything behind its end. Folded there as the CPU folds their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from psgc.torch.device.sent import STATUS_BYTES, Sent
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, bits, status, tensor, values

# With a part of which most is sent, so that some payloads hold every element; blocks of which the last, a short one, is sent by some alone.
TEXTS = (
    ("topk:k=0.1", (1, 9, 400)),
    ("topk:k=0.1,select=sampled", (400,)),
    ("topk:k=0.1,select=mstopk", (300,)),
    ("topk:k=0.6", (300,)),
    ("topk:k=0.97", (300,)),
    ("topk:k=0.1,warmup=4", (300,)),
    ("blocktopk:k=0.3,block=7", (1, 400)),
    ("blocktopk:k=1,block=130", (401,)),
)


def clustered(numel: int, seed: int) -> Any:
    """Elements whose largest lie apart or together, so that their gaps need other numbers of bits for each seed."""
    x = values(numel, seed) * np.float32(1e-3)
    if seed == 1:
        x[: -(-numel // 3)] *= np.float32(1e5)
    if seed == 2:
        x[-1] = np.float32(1e6)  # of the last block
    if seed == 3:
        x[::2] = 0  # a sampled threshold of 0 sends fewer
    if seed == 4:
        x[numel // 2 : numel // 2 + numel // 30] *= np.float32(1e-9)  # what is not sent lies together
    return x


def sent_at_bound(pair: Pair, x: Any, seed: int) -> tuple[Sent, Any]:
    """The payload as `finish_there` leaves it on a GPU, and its bytes."""
    numel, garbage = x.size, np.random.default_rng(seed).integers(0, 256, STATUS_BYTES + pair.codec.payload_bound(x.size))
    sent = Sent(torch.from_numpy(garbage.astype(np.uint8)).to(pair.device))
    sent.status.zero_()
    residual = tensor(values(numel, 90 + seed), pair.device) if pair.codec.feedback else None
    stream = replace(STREAM, rank=seed, step=1 + seed)
    pair.side.encode(tensor(x, pair.device), residual, RESCALE, stream, sent.room, sent.status, pair.scratch(numel))
    wanted = pair.cpu_payload(x, None if residual is None else values(numel, 90 + seed), stream)
    assert int(sent.status[1]) == wanted.size <= sent.room.numel()
    assert_same(sent.room.cpu().numpy()[: wanted.size], wanted, f"payload {seed} of {pair.codec.canonical}, {numel}")
    return sent, wanted


@pytest.mark.parametrize(("text", "sizes"), TEXTS)
def test_payloads_of_other_lengths_in_memory_of_their_bound_are_used_as_on_the_cpu(
    device: torch.device, text: str, sizes: tuple[int, ...]
) -> None:
    pair = Pair(text, device)
    for numel in sizes:
        both = [sent_at_bound(pair, clustered(numel, seed), seed) for seed in range(5)]
        rooms, payloads = [sent.room for sent, _ in both], [payload for _, payload in both]
        if numel >= 400 or "0.6" in text:
            assert len({payload.size for payload in payloads}) > 1, "payloads of several lengths"
        if "0.97" in text:
            assert len({payload[:4].tobytes() for payload in payloads}) == 2, "some hold every element"
        for fresh in (True, False):
            wanted = values(numel, 98, "zeros")
            acc = tensor(wanted, device)
            pair.codec.fold(payloads, numel, 0, numel, wanted, fresh)
            pair.side.fold(rooms, numel, acc, fresh)
            assert_same(bits(acc), wanted.view(np.uint32), f"sum of {text}, {numel}, fresh={fresh}")
        check_answer(pair, pair, rooms, payloads, numel)
        elements, target = np.empty(numel, np.float32), torch.full((numel,), 7.0, device=device)
        pair.codec.decode(payloads[-1], numel, 0, numel, elements)
        pair.side.decode(rooms[-1], numel, target)
        assert_same(bits(target), elements.view(np.uint32), f"elements of {text}, {numel}")


def check_answer(pair: Pair, push: Pair, rooms: list[torch.Tensor], payloads: list[Any], numel: int) -> None:
    """The sum's payload, encoded by ``pair``, in memory of its bound, and what it leaves out."""
    sums, feedback = np.empty(numel, np.float32), pair.codec.feedback
    push.codec.fold(payloads, numel, 0, numel, sums, True)
    residual, kept = (values(numel, 97), np.empty(numel, np.float32)) if feedback else (None, None)
    wanted = np.zeros(pair.codec.payload_bound(numel), np.uint8)
    encoded = pair.codec.finish(sums, numel, 0, numel, 3, residual, kept, RESCALE, STREAM, wanted)
    out, state = pair.out(numel), status(pair.device)
    old, new = (None, None) if residual is None else (tensor(residual, pair.device), torch.full((numel,), 7.0, device=pair.device))
    assert pair.side.fold_and_finish(push.codec, rooms, numel, 3, old, new, RESCALE, STREAM, out, state, pair.scratch(numel))
    assert state.tolist() == [int(encoded.nonfinite), encoded.payload_bytes]
    what = f"answer of {pair.codec.canonical} to {push.codec.canonical}, {numel}"
    assert_same(out.cpu().numpy()[: encoded.payload_bytes], wanted[: encoded.payload_bytes], what)
    if new is not None and kept is not None:
        assert_same(bits(new), kept.view(np.uint32), f"{what}, residual")


def test_payloads_of_another_k_in_memory_of_their_bound_are_folded_into_an_answer_as_on_the_cpu(device: torch.device) -> None:
    for push_text, text in (("topk:k=0.2,select=sampled", "topk:k=0.05"), ("blocktopk:k=0.3,block=7", "blocktopk:k=0.1,block=16")):
        push, pair = Pair(push_text, device), Pair(text, device)
        both = [sent_at_bound(push, clustered(300, seed), seed) for seed in range(3)]
        check_answer(pair, push, [sent.room for sent, _ in both], [payload for _, payload in both], 300)
