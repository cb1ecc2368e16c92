"""Codecs that are written with the kit, on the GPU: the manual's MXFP4 and its operators, held against the CPU's bytes."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs.backends import backends, cuda_side
from psgc.codecs.kit import Field, KitCodec
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.kit.ops import Ops
from psgc.device.codec import Decoding, Encoding
from tests.codecs.conftest import code_of_page
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, bits, status, tensor, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Stochastic(KitCodec):
    """Codes of 5 bits, rounded at random, in blocks with an f16 scale; whole numbers of 32 bits besides."""

    name = "stochastic"
    blockwise = True

    def fields(self, numel: int) -> Any:
        return {
            "scales": Field("f16", count=-(-numel // 64)),
            "codes": Field("u5", count=numel),
            "tops": Field("u32", count=-(-numel // 64)),
        }

    def compress(self, ops: Ops, p: Any, random: Any) -> Any:
        top = ops.block_reduce(p, 64, "magnitude")
        scales = ops.cast(ops.saturate(ops.cast(top / 15, "f16")), "f32")
        codes = ops.round_at_random(ops.divide(p, ops.spread(scales, 64, p.size)), random.uniform())
        return {
            "scales": ops.cast(scales, "f16"),
            "codes": ops.cast(ops.clip(codes, -15, 15) + 15, "u8"),
            "tops": ops.bitcast(top, "u32") >> 3,
        }

    def expand(self, ops: Ops, fields: Any, numel: int) -> Any:
        scales = ops.spread(ops.cast(fields["scales"], "f32"), 64, numel)
        return (ops.cast(fields["codes"], "f32") - 15) * scales


class Varying(Stochastic):
    """Has as many elements as data say."""

    name = "varying"
    blockwise = False

    def fields(self, numel: int) -> Any:
        return {"places": Field("indices", at_most=numel)}


def kit_pair(codec: Any, device: torch.device) -> Pair:
    pair = object.__new__(Pair)
    pair.codec, pair.device, pair.side = codec, device, cuda_side(codec)
    return pair


def test_mxfp4_of_the_manual_has_the_bytes_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "mxfp4_codec.py").write_text(code_of_page("mxfp4_codec.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        codec = importlib.import_module("mxfp4_codec").Mxfp4Codec()
        assert backends(codec) == ("cpu", "cuda")
        pair = kit_pair(codec, device)
        for numel in (1, 33, 5000):
            pair.check_all(values(numel, numel), FLOATS, payloads=3)
        for special in ("zeros", "denormal", "huge", "nothing", "nan", "inf"):
            pair.check_all(values(300, 4, special), FLOATS[:1])
        del sys.modules["mxfp4_codec"]


def test_random_rounding_and_every_width_of_field_have_the_bytes_of_the_cpu(device: torch.device) -> None:
    for ef in (False, True):
        pair = kit_pair(Stochastic(ef=ef), device)
        for numel in (1, 130, 4099):
            pair.check_all(values(numel, numel), FLOATS[:2], payloads=8)


class Trimmed(KitCodec):
    """The largest quarter, and the mean of what is positive, of which there may be any number."""

    name = "trimmed"

    def fields(self, numel: int) -> Any:
        return {"mean": Field("f32", count=1), "places": Field("u32", count=numel // 4 + 1), "values": Field("f32", count=numel // 4 + 1)}

    def compress(self, ops: Ops, p: Any, random: Any) -> Any:
        places = ops.largest(p, p.size // 4 + 1)
        return {
            "mean": ops.reduce(ops.extract(p, ops.select(p > 0)), "sum") / p.size,
            "places": ops.cast(places, "u32"),
            "values": ops.extract(p, places),
        }

    def expand(self, ops: Ops, fields: Any, numel: int) -> Any:
        return ops.scatter(ops.cast(fields["places"], "i64"), fields["values"], numel)


class Spectral(KitCodec):
    """Most operators that work on several parts at once."""

    name = "spectral"

    def fields(self, numel: int) -> Any:
        return {
            "top": Field("f32", count=2),
            "places": Field("u16", count=5),
            "values": Field("f16", count=8),
            "codes": Field("u2", count=numel),
        }

    def compress(self, ops: Ops, p: Any, random: Any) -> Any:
        turned = ops.dct(p, 16)
        places = ops.largest(turned, 5)
        top = ops.concat(ops.reduce(p, "max"), ops.reduce(ops.absolute(p), "sum"))
        values = ops.concat(ops.extract(turned, places), ops.fill(2.5, 3))
        codes = ops.nearest((-1.0, 0.0, 0.5, 4.0), ops.where(p > 0, p, ops.fill(1.0, p.size)) * ops.reduce(p, "max"))
        return {"top": top, "places": ops.cast(places, "u16"), "values": ops.cast(values, "f16"), "codes": codes}

    def expand(self, ops: Ops, fields: Any, numel: int) -> Any:
        return ops.lookup((-1.0, 0.0, 0.5, 4.0), fields["codes"])


@pytest.mark.parametrize("codec", [Stochastic(), Stochastic(ef=True), Spectral(), Trimmed()], ids=lambda codec: str(codec.canonical))
def test_parts_of_one_length_are_encoded_by_one_run_of_the_operators(device: torch.device, codec: Any) -> None:
    """But where an operator takes one part at a time; and each has the bytes that it has by itself."""
    pair, items, calls = kit_pair(codec, device), [], 0
    for number, numel in enumerate((300, 77, 300, 300, 1000, 77, 300)):
        x = values(numel, number, ("", "nan", "zeros", "inf")[number % 4])
        grad = tensor(x, device, torch.bfloat16 if number == 6 else torch.float32)
        residual = tensor(values(numel, 99), device) if codec.feedback else None
        items.append(Encoding(grad, residual, RESCALE, replace(STREAM, bucket=number, step=number + 1), pair.out(numel), status(device)))
    items[2].status[0] = 1  # an input of before was not finite
    compress = codec.compress

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return compress(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(codec), "compress", staticmethod(counted))
        pair.side.encode_many(items)
    assert calls == (4 if codec.name != "trimmed" else 2 + len(items))  # lengths and dtypes; two groups were tried in vain
    for number, item in enumerate(items):
        alone, state = pair.out(item.grad.numel()), status(device)
        pair.side.encode(item.grad, item.residual, RESCALE, item.stream, alone, state)
        if number == 2:
            state[0] |= 1
        assert item.status.tolist() == state.tolist()
        assert_same(item.out.cpu().numpy(), alone.cpu().numpy(), f"{codec.name}, part {number}")


class Shortened(Trimmed):
    """Reads by an operator that takes one part at a time."""

    name = "shortened"

    def expand(self, ops: Ops, fields: Any, numel: int) -> Any:
        kept = ops.select(fields["values"] > 0)
        places = ops.extract(ops.cast(fields["places"], "i64"), kept)
        return ops.scatter(places, ops.extract(fields["values"], kept), numel)


class Flat(Trimmed):
    """Elements that say nothing of the payload."""

    name = "flat"

    def expand(self, ops: Ops, fields: Any, numel: int) -> Any:
        return ops.fill(0.25, numel)


@pytest.mark.parametrize(
    "codec", [Stochastic(), Stochastic(ef=True), Spectral(), Trimmed(), Shortened(), Flat()], ids=lambda codec: str(codec.canonical)
)
def test_payloads_of_parts_of_one_length_are_used_alike_by_one_run_of_the_operators(device: torch.device, codec: Any) -> None:
    """But where an operator takes one part at a time; and each gives the floats that it gives by itself."""
    pair, items, alone, calls = kit_pair(codec, device), [], [], 0
    for number, numel in enumerate((300, 77, 300, 1000, 300)):
        payloads = []
        for seed in range(3):
            out = pair.out(numel)  # with anything behind the payload
            payload = pair.cpu_payload(
                values(numel, 10 * number + seed, "zeros" if seed else ""), values(numel, 99) if codec.feedback else None
            )
            out[: payload.size] = torch.from_numpy(payload).to(device)
            payloads.append(out)
        for use, count, dtype in (("decode", 1, FLOATS[number % 2]), ("decode", 3, FLOATS[0]), ("add", 2, FLOATS[0])):
            items.append(Decoding(payloads[:count], numel, tensor(values(numel, 98, "zeros"), device, dtype), use))
        if codec.feedback:
            grad = tensor(values(numel, 5, "nan"), device, FLOATS[0])
            items.append(Decoding(payloads[:1], numel, tensor(values(numel, 97), device), "commit", grad, RESCALE))
    for item in items:
        alone.append(replace(item, target=item.target.clone()))
        pair.side.decode_one(alone[-1])
    expand = codec.expand

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return expand(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(codec), "expand", staticmethod(counted))
        pair.side.decode_many(items)
    together, by_each = 3 + codec.feedback, 6 + codec.feedback  # uses; payloads in them, by each part
    assert calls == together + by_each * (5 if codec.name == "shortened" else 2)  # two parts have a length of their own
    for item, by_itself in zip(items, alone, strict=True):
        assert_same(bits(item.target), bits(by_itself.target), f"{codec.name}: {item.use} of {len(item.payloads)}, {item.numel} elements")


def test_a_codec_whose_payloads_vary_in_length_has_no_gpu_side(device: torch.device) -> None:
    assert cuda_side(Varying()) is None


def test_operators_give_the_bits_of_their_definitions(device: torch.device) -> None:
    from psgc.cuda.kit.ops import TorchOps
    from psgc.cuda.kit.vectors import DeviceVector

    here, there = CpuOps(), TorchOps(device)
    x, y = values(5003, 1, "zeros"), values(5003, 2)
    a, b = (DeviceVector(torch.from_numpy(v.copy()).to(device), "f32") for v in (x, y))
    for what in (
        lambda ops, u, v: ops.reduce(u, "sum"), lambda ops, u, v: ops.reduce(u, "min"), lambda ops, u, v: ops.block_reduce(u, 256, "sum"),
        lambda ops, u, v: ops.dct(u, 16), lambda ops, u, v: ops.idct(u, 64), lambda ops, u, v: u / 3 - v * 0.1 + 2, lambda ops, u, v: 1 / (v + 1e-3),
        lambda ops, u, v: ops.where((u < v) & ~(u == 0), u, 5), lambda ops, u, v: ops.scatter(ops.largest(u, 700), ops.extract(v, ops.largest(u, 700)), 5003),
        lambda ops, u, v: ops.filter(u > v, u), lambda ops, u, v: ops.concat(ops.floor(u), ops.round(v)), lambda ops, u, v: ops.divide(v, u),
        lambda ops, u, v: ops.lookup((0.1, -3.5, 7.0), ops.nearest((-1.0, 0.0, 2.5), u)), lambda ops, u, v: ops.uniform(STREAM, 4096, 500),
        lambda ops, u, v: ops.bitcast((ops.bitcast(u, "u32") << 3) | 1, "f32"),
    ):  # fmt: skip
        wanted, got = what(here, x, y), what(there, a, b)
        assert_same(got.data.cpu().numpy().view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32), "an operator's result")
