"""Many parts in one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psgc.cuda.common.device_codec import Encoding
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, status, tensor, values


def test_each_part_has_the_bytes_that_it_has_by_itself(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.cuda.common import launching  # imports triton, which may be missing where this test is skipped

    launched: list[object] = []

    def observe(*launch: object) -> None:
        launched.append(launch)

    monkeypatch.setattr(launching, "observers", [observe])
    for text in ("int8", "int4:ef=0", "int8:rotate=1", "onebit", "onebit:ef=0,scale=unit", "bf16"):
        pair, items = Pair(text, device), []
        for number, numel in enumerate((1, 300, 2100, 70)):
            dtype = torch.bfloat16 if number == 1 else torch.float32
            x = values(numel, number, "nan" if number == 2 else "")
            memory = torch.zeros(numel + 1, dtype=dtype, device=device)
            grad = memory[number % 2 :][:numel].copy_(tensor(x, device, dtype))  # some begin at no multiple of 16 bytes
            residual = tensor(values(numel, 99), device) if pair.codec.feedback else None
            items.append(Encoding(grad, residual, RESCALE, replace(STREAM, bucket=number), pair.out(numel), status(device)))
        launched.clear()
        for _ in range(2):  # the second time, with the first one's tables
            pair.side.encode_many(items)
        if text != "bf16":  # which has no such kernel
            assert len(launched) == 4  # each time, one for each dtype
        for number, item in enumerate(items):
            alone, state = pair.out(item.grad.numel()), status(device)
            pair.side.encode(item.grad, item.residual, RESCALE, item.stream, alone, state)
            assert item.status.tolist() == state.tolist(), text
            assert_same(item.out.cpu().numpy(), alone.cpu().numpy(), f"{text}, part {number}")
