"""Many parts are encoded in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs.registry import registered_codecs
from psgc.device.codec import Decoding, Encoding
from psgc.errors import CodecError
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, bits, payload_tensor, status, tensor, values

WRITTEN = (
    "int8", "int4:ef=0", "int8:rotate=1", "onebit", "onebit:ef=0,scale=unit", "bf16", "randomk:k=0.3", "randomk:ef=0", "topk:k=0.1",
    "topk:k=0.4,select=sampled", "topk:k=0.99,ef=0", "blocktopk:k=0.3,block=7", "blocktopk:k=2,block=4500",
)  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN)
def test_each_part_has_the_bytes_that_it_has_by_itself(device: torch.device, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from psgc.cuda.common import launching  # imports triton, which may be missing where this test is skipped

    launched: list[object] = []

    def observe(*launch: object) -> None:
        launched.append(launch)

    monkeypatch.setattr(launching, "observers", [observe])
    pair, items = Pair(text, device), []
    for number, numel in enumerate((1, 300, 2100, 70)):
        dtype = torch.bfloat16 if number == 1 else torch.float32
        x = values(numel, number, "nan" if number == 2 else "")
        memory = torch.zeros(numel + 1, dtype=dtype, device=device)
        grad = memory[number % 2 :][:numel].copy_(tensor(x, device, dtype))  # some begin at no multiple of 16 bytes
        residual = tensor(values(numel, 99), device) if pair.codec.feedback else None
        items.append(
            Encoding(grad, residual, RESCALE, replace(STREAM, bucket=number), pair.out(numel), status(device), pair.scratch(numel))
        )
    launched.clear()
    for _ in range(2):  # the second time, with the first one's tables
        pair.side.encode_many(items)
    assert len(launched) == 4  # each time, one for each dtype
    for number, item in enumerate(items):
        alone, state = pair.out(item.grad.numel()), status(device)
        pair.side.encode(item.grad, item.residual, RESCALE, item.stream, alone, state, pair.scratch(item.grad.numel()))
        assert item.status.tolist() == state.tolist(), text
        size = int(state[1])
        assert_same(item.out.cpu().numpy()[:size], alone.cpu().numpy()[:size], f"{text}, part {number}")


@pytest.mark.parametrize("text", ["int8:ef=0", "onebit", "topk:k=0.1", "topk:k=0.1,select=sampled", "blocktopk:k=0.3,block=5"])
def test_hundreds_of_tensors_take_one_launch_and_have_the_bytes_of_the_cpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    from psgc.cuda.common import launching

    launched: list[object] = []
    monkeypatch.setattr(launching, "observers", [lambda *launch: launched.append(launch)])
    pair, items, wanted = Pair(text, device), [], []
    interpreted = {"int8:ef=0": 300, "onebit": 8}.get(text, 24)  # the interpreter takes seconds for each part of the others
    for number in range(300 if device.type == "cuda" else interpreted):
        numel = (1, 7, 8, 9, 63, 130)[number % 6]
        x = values(numel, number, ("", "zeros", "nothing", "denormal", "huge")[number % 5])
        residual = values(numel, 1000 + number) if pair.codec.feedback else None
        stream = replace(STREAM, bucket=number)
        wanted.append(pair.cpu_payload(x, residual, stream))
        old = None if residual is None else tensor(residual, device)
        items.append(Encoding(tensor(x, device), old, RESCALE, stream, pair.out(numel), status(device), pair.scratch(numel)))
    pair.side.encode_many(items)
    assert len(launched) == 1
    for item, payload in zip(items, wanted, strict=True):
        assert item.status[1] == payload.size
        assert_same(item.out.cpu().numpy()[: payload.size], payload, f"{text}, {item.grad.numel()} elements")


def test_parts_that_one_program_does_not_encode_are_encoded_one_by_one_beside_those_that_it_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones, those of MSTop-K, and steps of a warm-up by the k that each has."""
    from psgc.cuda.sparsify import blocktopk, topk

    monkeypatch.setattr(topk, "ONE_PROGRAM_ELEMENTS", 200)
    monkeypatch.setattr(blocktopk, "ONE_PROGRAM_ELEMENTS", 200)
    for text in ("topk:k=0.1", "blocktopk:k=0.3,block=7", "topk:k=0.1,select=mstopk", "topk:k=0.1,warmup=8"):
        pair, items, wanted = Pair(text, device), [], []
        for number, numel in enumerate((150, 201, 150, 201)):
            stream = replace(STREAM, step=1 + 4 * number)
            wanted.append(pair.cpu_payload(values(numel, number), values(numel, 99), stream))
            grad, residual = tensor(values(numel, number), device), tensor(values(numel, 99), device)
            items.append(Encoding(grad, residual, RESCALE, stream, pair.out(numel), status(device), pair.scratch(numel)))
        pair.side.encode_many(items)
        for item, payload in zip(items, wanted, strict=True):
            assert_same(item.out.cpu().numpy()[: int(item.status[1])], payload, text)
    with pytest.raises(CodecError, match=r"^codec topk: scratch has 0 bytes; \d+ expected"):
        Pair("topk", device).side.encode_many([replace(items[0], scratch=None)])


READ = (
    "int8",
    "int4:ef=0",
    "int8:rotate=1",
    "dithering",
    "onebit",
    "onebit:ef=0,scale=unit",
    "bf16",
    "none",
    "randomk:k=0.3",
    "randomk:ef=0",
    "topk:k=0.1",
    "topk:k=0.6,ef=0",
    "topk:k=0.1,select=sampled",
    "blocktopk:k=0.3,block=7",
    "blocktopk:k=1,block=2000",
)


@pytest.mark.parametrize("text", READ)
def test_payloads_that_are_used_together_give_the_floats_that_each_gives_by_itself(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Decoded, committed, added up, and added to what is there: a launch for each use, number of payloads and dtype."""
    from psgc.cuda.common import launching

    launched: list[object] = []
    monkeypatch.setattr(launching, "observers", [lambda *launch: launched.append(launch)])
    pair, items, alone = Pair(text, device), [], []
    for number, (numel, special) in enumerate(((1, ""), (9, "zeros"), (300, "huge"), (2100, ""), (70, "nothing"))):
        x = values(numel, number, special)
        payloads = [payload_tensor(pair.cpu_payload(x if seed == 0 else values(numel, 50 + seed)), device) for seed in range(3)]
        for use, count, dtype in (
            ("decode", 1, torch.float32),
            ("decode", 1, torch.bfloat16),
            ("decode", 3, torch.float32),
            ("add", 2, torch.float32),
        ):
            items.append(Decoding(payloads[:count], numel, placed(values(numel, 99, "zeros"), device, dtype, number), use))
        if pair.codec.feedback:
            grad = placed(x, device, torch.bfloat16 if number == 2 else torch.float32, number)
            items.append(Decoding(payloads[:1], numel, placed(values(numel, 98), device, torch.float32, 0), "commit", grad, RESCALE))
    for item in items:
        alone.append(replace(item, target=item.target.clone()))
        pair.side.decode_one(alone[-1])
    launched.clear()
    pair.side.decode_many(items)
    assert len(launched) == (6 if pair.codec.feedback else 4)
    for item, by_itself in zip(items, alone, strict=True):
        assert_same(bits(item.target), bits(by_itself.target), f"{text}: {item.use} of {len(item.payloads)}, {item.numel} elements")


def placed(x: Any, device: torch.device, dtype: torch.dtype, number: int) -> torch.Tensor:
    """The elements, for every second number at no multiple of 16 bytes."""
    memory = torch.zeros(x.size + 1, dtype=dtype, device=device)
    return memory[number % 2 :][: x.size].copy_(tensor(x, device, dtype))


@pytest.mark.parametrize("text", ["topk:k=0.2", "topk:k=0.9", "blocktopk:k=0.3,block=5"])
def test_sparse_payloads_that_are_used_together_give_the_floats_of_the_cpu_and_those_of_large_parts_one_by_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """In memory of their bound, with anything behind their end."""
    from psgc.cuda.common import launching
    from psgc.cuda.sparsify import blocktopk, topk

    launched: list[str] = []
    monkeypatch.setattr(launching, "observers", [lambda kernel, *launch: launched.append(kernel.__name__)])
    monkeypatch.setattr(topk, "ONE_PROGRAM_ELEMENTS", 300)
    monkeypatch.setattr(blocktopk, "ONE_PROGRAM_ELEMENTS", 300)
    pair, items, wanted = Pair(text, device), [], []
    for number, numel in enumerate((1, 7, 8, 9, 63, 300, 301)):
        sources = [pair.cpu_payload(values(numel, 10 * number + k, ("", "zeros", "huge")[number % 3])) for k in range(4)]
        rooms = []
        for source in sources:
            rooms.append(pair.out(numel))
            rooms[-1][: source.size] = torch.from_numpy(source).to(device)
        for use, count in (("decode", 1), ("decode", 4), ("add", 1), ("add", 4), ("commit", 1)):
            target = values(numel, 99, "zeros")
            grad = tensor(values(numel, 1), device) if use == "commit" else None
            items.append(Decoding(rooms[:count], numel, tensor(target, device), use, grad, RESCALE if use == "commit" else 1.0))
            if use == "commit":
                pair.codec.commit(sources[0], numel, 0, numel, values(numel, 1), target, RESCALE)
            else:
                pair.codec.fold(sources[:count], numel, 0, numel, target, use == "decode")
            wanted.append(target)
    pair.side.decode_many(items)
    assert launched.count("read_many_kernel") == 5
    assert [name for name in launched if name in ("scatter_kernel", "apply_blocks_kernel")]  # of the large part
    for item, target in zip(items, wanted, strict=True):
        assert_same(bits(item.target), target.view(np.uint32), f"{text}: {item.use} of {len(item.payloads)}, {item.numel} elements")


def test_payloads_and_targets_that_do_not_fit_are_refused(device: torch.device) -> None:
    pair, target = Pair("int8", device), torch.zeros(50, device=device)
    payload = payload_tensor(pair.cpu_payload(values(50, 1)), device)
    for item, message in (
        (Decoding([payload[:5]], 50, target), "payload 0 of 50 elements is uint8"),
        (Decoding([payload], 50, target[1:]), "out has 49 elements, the part has 50"),
        (Decoding([payload] * 9, 50, target, "add"), "1 to 8 payloads are added at once, not 9"),
        (Decoding([payload], 50, target, "commit", target.double()), "grad is float64; float32, bfloat16, float16 expected"),
    ):
        with pytest.raises(CodecError, match=f"^codec int8: {message}"):
            pair.side.decode_many([item])


def test_none_keeps_every_bit_of_a_nan_however_many_parts_there_are(device: torch.device) -> None:
    pair = Pair("none", device, "bfloat16")
    odd = torch.tensor([0x7FC1, -0x3B, 0x7F81, 0x3F80], dtype=torch.int16, device=device).view(torch.bfloat16)
    out, back = pair.out(4), torch.zeros_like(odd)
    pair.side.encode_many([Encoding(odd, None, 1.0, STREAM, out, status(device))])
    pair.side.decode_many([Decoding([out], 4, back)])
    assert torch.equal(out[:8].view(torch.int16), odd.view(torch.int16)) and torch.equal(back.view(torch.int16), odd.view(torch.int16))


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
            with pytest.raises(CodecError, match=f"codec {pair.codec.name} carries parts of 1 to 2147483647 elements, not 0"):
                pair.side.encode_many([Encoding(empty, residual, 1.0, STREAM, pair.out(1), state, pair.scratch(1))])
            continue
        pair.side.encode(empty, residual, 1.0, STREAM, pair.out(1), state)
        pair.side.encode_many([Encoding(empty, residual, 1.0, STREAM, pair.out(1), state)])
        pair.side.decode(pair.out(1), 0, empty)
        pair.side.decode_many([Decoding([pair.out(1)], 0, empty)])
        assert state.tolist() == [0, 0], text
    assert launched == []
