"""BytePS's compressors: the payloads are those that byteps's own classes wrote, and other bytes are refused."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.errors import CodecError, PayloadError, RemoteProtocolError
from psgc.pslite.byteps.compressor import ErrorFeedback
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.byteps.topk import TopK
from tests.pslite.stock import StockCompressor, Unavailable, library

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden/pslite/payloads.json").read_text())
SPECS = [dict(spec) for spec in dict.fromkeys(tuple(one["settings"].items()) for one in RECORDED)]


def test_payloads_are_those_that_byteps_wrote_bit_for_bit_step_after_step() -> None:
    made: dict[Any, Any] = {}
    for one in RECORDED:
        registration = Registration.of(one["settings"])
        compressor = made.setdefault((registration, one["numel"]), registration.compressor(one["numel"]))
        values = np.frombuffer(bytes.fromhex(one["values"]), np.float32)
        assert compressor.encode(values.copy()).hex() == one["payload"], (one["settings"], one["numel"], one["step"])
        assert compressor.decode(bytes.fromhex(one["payload"])).tobytes().hex() == one["decoded"]
    assert {dict(key[0].settings)["compressor_type"] for key in made} == {"onebit", "topk", "randomk", "dithering"}


@pytest.mark.long
@pytest.mark.timeout(560)
def test_payloads_of_large_parts_are_those_of_byteps_built_from_its_source() -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"byteps 0.2.5.post15 cannot be built here: {error}")
    rng = np.random.default_rng(1)
    for spec in SPECS:
        registration = Registration.of(spec)
        for numel in (64, 4097, 250_001, 1_024_000):
            ours, theirs = registration.compressor(numel), StockCompressor(registration.text().decode(), numel)
            for step in range(3):
                values = (rng.normal(size=numel) * 10.0 ** rng.integers(-6, 3)).astype(np.float32)
                values[:: step + 2] = 0
                payload = theirs.encode(values)
                assert ours.encode(values.copy()) == payload, (spec, numel, step)
                assert ours.decode(payload).tobytes() == theirs.decode(payload).tobytes()


@given(st.sampled_from(SPECS), st.integers(2, 70).filter(lambda n: n >= 20), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_any_bytes_are_decoded_within_the_part_or_refused(spec: dict[str, str], numel: int, chance: Any) -> None:
    compressor = Registration.of(spec).compressor(numel)
    payload = bytearray(compressor.encode(np.linspace(-2, 3, numel, dtype=np.float32)))
    for _ in range(4):
        payload[chance.randrange(len(payload))] = chance.randrange(256)
    for foreign in (bytes(payload), bytes(payload[: chance.randrange(len(payload))]), chance.randbytes(chance.randrange(80))):
        with contextlib.suppress(PayloadError):
            assert compressor.decode(foreign).shape == (numel,)


def test_what_error_feedback_does_not_send_goes_with_the_next_step_at_the_learning_rate_of_then(tmp_path: Path) -> None:
    rate = tmp_path / "lr.s"
    for rates in (None, (0.5, 0.25)):
        if rates:
            rate.write_bytes(struct.pack("<d", rates[0]))
        feedback = ErrorFeedback(TopK(8, 1), rate)
        first = feedback.decode(feedback.encode(np.array([1, 5, 2, 0, 0, 0, 0, 0], np.float32)))
        assert first.tolist() == [0, 5, 0, 0, 0, 0, 0, 0]
        if rates:
            rate.write_bytes(struct.pack("<d", rates[1]))
        second = feedback.decode(feedback.encode(np.zeros(8, np.float32)))
        assert second.tolist() == [0, 0, 4.0 if rates else 2.0, 0, 0, 0, 0, 0]


def test_registrations_are_read_as_byteps_writes_them_in_any_order() -> None:
    made = Registration.parse(b"2 compressor_k 0.01 compressor_type topk")
    assert made == Registration.parse(b"2 compressor_type topk compressor_k 0.01")
    assert made == Registration.of({"byteps_compressor_type": "topk", "byteps_compressor_k": "0.01"})
    assert Registration.parse(made.text()) == made
    assert len(made.compressor(1_024_000).encode(np.ones(1_024_000, np.float32))) == 81_920
    for text in (b"", b"x", b"2 compressor_type topk", b"1 compressor_type", b"1 compressor_type gzip",
                 b"1 compressor_typo topk", b"1 compressor_type dithering",
                 b"2 compressor_k -1 compressor_type topk", b"2 compressor_type onebit compressor_type onebit", b"\xff", b"2 seed 0 compressor_type onebit",
                 b"2 compressor_type onebit compressor_onebit_scaling maybe", b"2 compressor_k 99 compressor_type dithering"
                 b" dithering_partition 1"):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            Registration.parse(text)


def test_settings_that_byteps_does_not_have_are_refused_with_what_was_expected() -> None:
    for given_settings, said in (
        ({"compressor_typ": "topk"}, "no setting 'compressor_typ'; did you mean compressor_type"), ({"compressor_type": "top"}, "expected one of onebit, topk"),
        ({"compressor_type": "topk"}, "compressor_k='': expected a number above 0"), (
            {"compressor_type": "topk", "compressor_k": "0.7"}, "half of them at most"),
        ({"compressor_type": "onebit", "ef_type": "other"}, "ef_type='other': expected vanilla"), ({"compressor_type": "one bit"}, "text without spaces"),
        ({"compressor_type": "onebit", "momentum_type": "nesterov"}, "momentum_mu='': expected a number"),
    ):  # fmt: skip
        with pytest.raises(CodecError, match=said):
            Registration.of(given_settings)
    with pytest.raises(CodecError, match="use fewer levels, or smaller parts"):
        Registration.of({"compressor_type": "dithering", "compressor_k": "1000000"}).compressor(20).encode(
            np.linspace(1, 2, 20, dtype=np.float32)
        )
