"""The header: its bytes are fixed by golden files, its table is PROTOCOL.md's, and no 64 bytes break the reader."""

from __future__ import annotations

import contextlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.wire.frames import (
    FIELDS,
    HEADER_BYTES,
    MAGIC,
    SCHEDULER_SENDER,
    SERVER_SENDER,
    VERSION,
    Flag,
    Header,
    Kind,
    pack_header,
    unpack_header,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "wire"
SAMPLES = {
    "push": Header(
        Kind.PUSH,
        Flag.WANT_RESULT | Flag.PREVIOUS_SKIPPED,
        0x0123456789ABCDEF,
        2,
        3,
        3 << 48 | 5 << 24 | 7,
        1 << 40,
        0,
        2,
        9,
        0,
        0.5,
        4 << 20,
    ),
    "skip": Header(Kind.SKIP, Flag.WANT_RESULT, 1, 1, 1, 1 << 48, 1, sender=0),
    "result": Header(Kind.RESULT, Flag.NONE, 1, 1, 1, 1 << 48, 1, codec=0xFFFF, sender=SERVER_SENDER + 3, contributors=8, payload_bytes=12),
    "nonfinite": Header(Kind.RESULT, Flag.NONFINITE, 1, 1, 1, 1 << 48, 2, sender=SERVER_SENDER, contributors=2),
    "window": Header(Kind.WINDOW, plan=65535, step=1 << 62, sender=SERVER_SENDER),
    "topology": Header(Kind.TOPOLOGY, job=1, epoch=1, sender=SCHEDULER_SENDER, payload_bytes=300),
    "register": Header(Kind.REGISTER, job=2**64 - 1, payload_bytes=200),
    "publish": Header(Kind.PUBLISH, job=1, epoch=1, plan=7, sender=3, payload_bytes=300),
    "lookup": Header(Kind.LOOKUP, job=1, epoch=1, plan=8, sender=2, payload_bytes=30),
    "report": Header(Kind.REPORT, job=1, epoch=1, sender=3, payload_bytes=200),
    "observe": Header(Kind.OBSERVE, job=1),
    "residual": Header(
        Kind.RESIDUAL,
        job=1,
        epoch=1,
        plan=2,
        key=2 << 48,
        step=12,
        sender=SERVER_SENDER + 1,
        contributors=16384,
        rescale=0.5,
        payload_bytes=65536,
    ),
    "restore": Header(Kind.RESTORE, job=1, epoch=1, plan=2, key=2 << 48, sender=1, contributors=32768, rescale=2.0, payload_bytes=12),
    "segment": Header(Kind.SEGMENT, key=4, payload_bytes=1 << 33),
}
RANGES = {"B": (0, 2**8 - 1), "H": (0, 2**16 - 1), "I": (0, 2**32 - 1), "Q": (0, 2**64 - 1)}


def fields_strategy() -> st.SearchStrategy[Header]:
    values = {
        name: st.floats(width=32, allow_nan=False, allow_infinity=False) if code == "f" else st.integers(*RANGES[code])
        for name, code, _ in FIELDS
        if name not in ("magic", "version")
    }
    return st.builds(
        Header,
        **{
            **values,
            "kind": st.sampled_from([int(k) for k in Kind]),
            "flags": st.sets(st.sampled_from(Flag)).map(sum),
            "version": st.just(VERSION),
        },
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_the_bytes_of_a_header_are_the_golden_ones(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert pack_header(SAMPLES[name]) == golden
    assert unpack_header(golden) == SAMPLES[name]


def test_every_golden_file_has_a_header() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(SAMPLES)


@given(fields_strategy())
def test_what_is_packed_is_unpacked_the_same(header: Header) -> None:
    assert unpack_header(memoryview(pack_header(header))) == header


@given(fields_strategy(), st.integers(0, 255))
def test_who_asks_for_any_version_reads_a_header_of_another_and_can_answer_in_it(header: Header, version: int) -> None:
    other = header._replace(version=version)
    assert unpack_header(pack_header(other), any_version=True) == other
    assert pack_header(other)[4] == version


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.binary(max_size=2 * HEADER_BYTES))
@example(b"")
@example(b"\xff" * HEADER_BYTES)
def test_any_bytes_are_a_header_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert pack_header(unpack_header(data)) == data


@given(fields_strategy(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_another_header_or_is_refused(header: Header, bit: int) -> None:
    data = bytearray(pack_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(RemoteProtocolError):
        read = unpack_header(bytes(data))
        assert pack_header(read) == bytes(data)
        assert repr(read) != repr(header)  # -0.0 equals 0.0


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({0: b"HTTP"}, 1, "is the peer psgc?"),
        ({4: bytes([VERSION + 1])}, 2, "install one psgc everywhere"),
        ({5: b"\x00"}, 3, "unknown message kind 0"),
        ({5: b"\xff"}, 3, "unknown message kind 255"),
        ({6: b"\x80\x00"}, 1, "unknown flag bits 0x80"),
        ({52: struct.pack("<f", math.nan)}, 1, "rescale"),
        ({52: struct.pack("<f", math.inf)}, 1, "rescale"),
    ],
)
def test_a_refusal_says_what_was_wrong(change: dict[int, bytes], code: int, words: str) -> None:
    data = bytearray(pack_header(SAMPLES["push"]))
    for offset, bytes_ in change.items():
        data[offset : offset + len(bytes_)] = bytes_
    with pytest.raises(RemoteProtocolError, match=words.replace("?", r"\?")) as caught:
        unpack_header(data)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"key": 1 << 64}, {"round": 1 << 16}, {"rescale": 1e39}, {"rescale": math.nan}, {"rescale": math.inf}]
)
def test_a_value_that_its_field_cannot_hold_is_our_own_error(wrong: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        pack_header(SAMPLES["push"]._replace(**wrong))


def test_a_header_is_64_bytes_and_starts_with_the_magic() -> None:
    assert pack_header(SAMPLES["push"])[:4] == MAGIC
    assert HEADER_BYTES == 64


def test_reserved_flag_bits_are_refused() -> None:
    for bit in {1 << number for number in range(16)} - set(Flag):
        with pytest.raises(RemoteProtocolError, match="unknown flag bits"):
            unpack_header(pack_header(Header(Kind.PUSH, bit)))
