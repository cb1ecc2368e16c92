"""Many parts in one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psgc.codecs.registry import registered_codecs
from psgc.cuda.common.device_codec import Encoding
from psgc.errors import CodecError
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, status, tensor, values


def test_each_part_has_the_bytes_that_it_has_by_itself(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.cuda.common import launching  # imports triton, which may be missing where this test is skipped

    launched: list[object] = []

    def observe(*launch: object) -> None:
        launched.append(launch)

    monkeypatch.setattr(launching, "observers", [observe])
    for text in ("int8", "int4:ef=0", "int8:rotate=1", "onebit", "onebit:ef=0,scale=unit", "bf16", "randomk:k=0.3", "randomk:ef=0"):
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
        assert len(launched) == 4  # each time, one for each dtype
        for number, item in enumerate(items):
            alone, state = pair.out(item.grad.numel()), status(device)
            pair.side.encode(item.grad, item.residual, RESCALE, item.stream, alone, state)
            assert item.status.tolist() == state.tolist(), text
            assert_same(item.out.cpu().numpy(), alone.cpu().numpy(), f"{text}, part {number}")


def test_none_copies_parts_of_its_own_dtype_alone(device: torch.device) -> None:
    for dtype in ("float32", "bfloat16"):
        pair = Pair("none", device, dtype)
        parts = [tensor(values(numel, numel), device, getattr(torch, dtype)) for numel in (1, 700)]
        items = [Encoding(part, None, 1.0, STREAM, pair.out(part.numel()), status(device)) for part in parts]
        pair.side.encode_many(items)
        for part, item in zip(parts, items, strict=True):
            size = int(item.status[1])
            assert torch.equal(item.out[:size], part.view(torch.uint8))
        with pytest.raises(CodecError, match="name the dtype when the codec is built"):
            pair.side.encode_many([replace(items[0], grad=items[0].grad.half())])


def test_an_empty_part_is_refused_by_sparse_codecs_as_on_the_cpu_and_takes_no_launch_of_others(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psgc.cuda.common import launching

    launched: list[object] = []
    monkeypatch.setattr(launching, "observers", [lambda *launch: launched.append(launch)])
    for text in (*registered_codecs(), "onebit:ef=0,scale=unit", "topk:select=sampled", "topk:select=mstopk"):
        pair, state = Pair(text, device), status(device)
        empty = torch.empty(0, device=device)
        residual = empty if pair.codec.feedback else None
        if pair.codec.sparse:
            with pytest.raises(CodecError, match=f"codec {pair.codec.name} carries parts of 1 to 2147483647 elements, not 0"):
                pair.side.encode(empty, residual, 1.0, STREAM, pair.out(1), state)
            continue
        pair.side.encode(empty, residual, 1.0, STREAM, pair.out(1), state)
        pair.side.encode_many([Encoding(empty, residual, 1.0, STREAM, pair.out(1), state)])
        pair.side.decode(pair.out(1), 0, empty)
        assert state.tolist() == [0, 0], text
    assert launched == []
