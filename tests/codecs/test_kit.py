"""The authoring kit: its operators equal their references, its codecs keep every law, and an author's mistakes give clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.codecs import Stream
from psgc.codecs.codec import F32, PLUGIN_ID
from psgc.codecs.kit import Choice, Field, KitCodec, Ops, Random, Real, Vector, Whole
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.kit.fields import FieldLayout
from psgc.errors import CodecError, PayloadError
from tests.cases import for_each

ROOT = Path(__file__).parents[2]
SIZES = [1, 7, 8, 9, 63, 64, 65, 4097, 70001]
STREAM = Stream(seed=7, step=3, rank=1, bucket=2, first=4096)
EXAMPLES = ("mxfp4", "levels3", "levels3:bits=5,ef=1", "levels3:bits=8,scale=mean", "halves", "halves:ef=0,k=1000")
Values = Callable[..., F32]


class Plain(KitCodec):
    """Sends everything, in a field that a test may replace."""

    name = "plain"
    field: Field | None = None
    tau = Real(0.5, least=0, most=1)
    many = Whole(3, least=1, most=10)
    word = Choice("left", "right")

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"all": self.field or Field("f32", count=numel)}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        return {"all": p}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return fields["all"]


def encode(codec: KitCodec, p: F32) -> Any:
    out = np.zeros(codec.payload_bound(p.size), np.uint8)
    return out[: codec.encode(p, None, 1.0, STREAM, out).payload_bytes]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "texts",
    [("threshold:tau=1", "levels3:bits=5,ef=1", "halves"), pytest.param(("threshold", *EXAMPLES), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_kit_codecs_of_another_package_keep_every_law(texts: tuple[str, ...], kit_package: Path) -> None:
    path = os.pathsep.join(filter(None, (str(kit_package), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "LAWS_FOR": " ".join(texts)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/codecs/test_laws.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("numel", SIZES)
def test_kernels_are_the_operators_definitions(numel: int, kinds: tuple[str, ...], values: Values) -> None:
    cpu, definition = CpuOps(), Ops()
    for kind in kinds:
        x = values(kind, numel)
        for how in ("sum", "max", "min", "magnitude"):
            with np.errstate(over="ignore", invalid="ignore"):
                assert cpu.reduce(x, how).tobytes() == definition.reduce(x, how).tobytes()
                for block in (1, 16, 4096):
                    assert cpu.block_reduce(x, block, how).tobytes() == definition.block_reduce(x, block, how).tobytes()
        for k in {1, numel // 3 + 1, numel}:
            assert cpu.largest(x, k).tolist() == definition.largest(x, k).tolist()
        assert cpu.saturate(x * np.float32(1)).tobytes() == definition.saturate(x).tobytes()
    assert cpu.uniform(STREAM, 5, numel).tobytes() == definition.uniform(STREAM, 5, numel).tobytes()


@for_each(numel=SIZES, bits=[1, 2, 3, 5, 7, 8])
def test_packed_codes_come_back(numel: int, bits: int) -> None:
    codes = np.random.default_rng(numel).integers(0, 1 << bits, numel, np.uint8)
    cpu, definition = CpuOps(), Ops()
    packed = cpu.pack(codes, bits)
    assert packed.tobytes() == definition.pack(codes, bits).tobytes()
    assert cpu.unpack(packed, bits, numel).tobytes() == definition.unpack(packed, bits, numel).tobytes() == codes.tobytes()


@pytest.mark.parametrize("numel", SIZES)
def test_packed_indices_come_back(numel: int) -> None:
    cpu, definition = CpuOps(), Ops()
    for share in (0.0, 0.01, 1.0):
        indices = np.flatnonzero(np.random.default_rng(numel).random(numel) < share)
        packed = cpu.pack_indices(indices)
        assert packed.tobytes() == definition.pack_indices(indices).tobytes()
        assert cpu.unpack_indices(packed, indices.size).tolist() == definition.unpack_indices(packed, indices.size).tolist()
        assert cpu.unpack_indices(packed, indices.size).tolist() == indices.tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_saturated_values_are_finite(poison: float) -> None:
    for dtype in (np.float32, np.float16):
        x = np.array([1, poison, -2], dtype)
        made = CpuOps().saturate(x)
        assert made.tobytes() == Ops().saturate(x).tobytes()
        assert np.isfinite(made).all()
        assert made[[0, 2]].tolist() == [1, -2]


def test_reductions_of_nothing_are_neutral() -> None:
    nothing = np.empty(0, np.float32)
    for ops in (CpuOps(), Ops()):
        assert [float(ops.reduce(nothing, how)[0]) for how in ("sum", "max", "min", "magnitude")] == [0, -np.inf, np.inf, 0]


def test_parameters_are_read_checked_and_printed() -> None:
    codec: Any = Plain.from_parameters({"tau": ".250", "many": "07", "word": "right", "ef": "0"}, "float32")
    assert (codec.tau, codec.many, codec.word, codec.feedback) == (0.25, 7, "right", False)
    assert codec.parameters == {"tau": "0.25", "many": "7", "word": "right", "ef": "0"}
    assert Plain.from_parameters({"tau": "0.5"}, "float32").parameters == {}
    assert PLUGIN_ID <= codec.codec_id < 2 * PLUGIN_ID


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tau": "2"}, "plain: parameter tau is a number from 0 to 1, not '2'"),
        ({"tau": "nan"}, "not 'nan'"),
        ({"tau": "x"}, "not 'x'"),
        ({"many": "0"}, "many is a whole number from 1 to 10, not '0'"),
        ({"many": "1.0"}, "not '1.0'"),
        ({"word": "up"}, "word is left or right, not 'up'"),
        ({"ef": "2"}, "ef is 0 or 1, not '2'"),
        ({"rho": "1"}, "unknown parameter 'rho'; it takes tau, many, word, ef"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        Plain.from_parameters(given, "float32")


def test_a_parameter_that_every_codec_takes_cannot_be_declared() -> None:
    with pytest.raises(CodecError, match="codec Clipped: parameter clip is one that every codec takes"):
        type("Clipped", (Plain,), {"name": "clipped", "clip": Real(0, least=0, most=1)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "f64", "count": 1}, "field of type 'f64': expected f32, "),
        ({"type": "f32"}, "exactly one of count, at_most and as_many_as expected, got 0"),
        ({"type": "f32", "count": 1, "at_most": 2}, "got 2"),
    ],
)
def test_a_field_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        Field(**given)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (Field("f32", count=9), r"compress gave float32\[10\] for field 'all', which is float32\[9\]"),
        (Field("f32", at_most=9), r"which is float32\[up to 9\]"),
        (Field("u8", count=10), r"which is uint8\[10\]"),
        (Field("f32", as_many_as="others"), "as long as 'others', which is not declared before it"),
    ],
)
def test_compress_must_give_what_fields_says(field: Field, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "field", field)
    with pytest.raises(CodecError, match=words):
        encode(Plain(), np.ones(10, np.float32))


def test_compress_must_name_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "compress", lambda *_: {"some": 0})
    with pytest.raises(CodecError, match=r"compress gave \['some'\], but its fields are \['all'\]"):
        encode(Plain(), np.ones(10, np.float32))


@pytest.mark.parametrize("wrong", [[3, 2], [2, 2], [-1], [10]])
def test_indices_must_ascend_within_the_part(wrong: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "field", Field("indices", at_most=10))
    monkeypatch.setattr(Plain, "compress", lambda *_: {"all": np.array(wrong)})
    with pytest.raises(CodecError, match="do not ascend from 0 to below 10"):
        encode(Plain(), np.ones(10, np.float32))


def test_expand_must_give_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode(Plain(), np.ones(10, np.float32))
    monkeypatch.setattr(Plain, "expand", lambda *_: np.ones(9))
    with pytest.raises(CodecError, match=r"expand gave float64\[9\], not float32\[10\]"):
        Plain().decode(payload, 10, 0, 10, np.empty(10, np.float32))


def test_what_expand_overflows_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, out = encode(Plain(), np.ones(3, np.float32)), np.empty(3, np.float32)
    monkeypatch.setattr(Plain, "expand", lambda *_: np.array([np.inf, np.nan, -1], np.float32))
    Plain().decode(payload, 3, 0, 3, out)
    assert out.tolist() == [float(np.finfo(np.float32).max), 0, -1]


@pytest.mark.parametrize("count", [lambda n: max(1, n // 4096), lambda n: -(-n // 4096) + 1, lambda n: n // 5])
def test_blockwise_counts_add_up(count: Callable[[int], int]) -> None:
    class Uneven(Plain):
        name = "uneven"
        blockwise = True

        def fields(self, numel: int) -> Mapping[str, Field]:
            return {"all": Field("f32", count=count(numel))}

    with pytest.raises(CodecError, match="uneven is blockwise, but field 'all' has"):
        Uneven()


def test_blockwise_bits_end_at_bytes() -> None:
    class Flags(Plain):
        name = "flags"
        blockwise = True

        def fields(self, numel: int) -> Mapping[str, Field]:
            return {"all": Field("u1", count=-(-numel // 4096))}

    with pytest.raises(CodecError, match="in whole bytes"):
        Flags()


@pytest.mark.parametrize(
    ("field", "payload", "words"),
    [
        (Field("f32", count=2), np.array([1, np.nan], np.float32), "field 'all' holds NaN or infinity"),
        (Field("f16", count=1, least=0), np.array([-1], np.float16), "holds values from -1.0 to -1.0, beyond 0 to None"),
        (Field("u3", count=3, most=5), np.array([0b10111000, 0], np.uint8), "holds values from 0 to 7, beyond None to 5"),
        (Field("u8", at_most=3), np.array([4, 0, 0, 0, 1, 1, 1, 1], np.uint8), "has 4 elements, at most 3 expected"),
        (Field("u8", at_most=3), np.array([2, 0, 0, 0, 1], np.uint8), "is not 2 of u8 within its 5 bytes"),
        (Field("u8", at_most=3), np.array([1, 0, 0], np.uint8), "3 bytes are too few for 1 counts"),
        (Field("u8", count=1), np.array([1, 1], np.uint8), "has 2 bytes, its fields take 1"),
        (Field("indices", count=1), np.array([8, 10], np.uint8), "is not 1 of indices within its 2 bytes"),
        (Field("indices", count=200), np.array([8], np.uint8), "is not 200 of indices"),
        (Field("indices", count=1), np.array([255], np.uint8), "is not 1 of indices"),
    ],
)
def test_bytes_that_are_no_fields_are_refused(field: Field, payload: Any, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        FieldLayout("plain", {"all": field}, 10).validate(CpuOps(), payload.view(np.uint8))
