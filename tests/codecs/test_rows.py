"""The payload of sparse gradients: its bytes, its sums against those of dense gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psgc.codecs import Stream, parse_codec, parse_scheme
from psgc.codecs.rows import Rows, RowsCodec, read_rows, words_of, write_rows
from psgc.errors import CodecError, PayloadError

OF, COLUMNS = 40, 3
STILL = Stream(0, 0, 0, 0)


def codec_of(values: str = "float32") -> RowsCodec:
    made = parse_codec(f"rows:of={OF},columns={COLUMNS}" + ("" if values == "float32" else f",values={values}"))
    assert isinstance(made, RowsCodec)
    return made


def drawn(seed: int, present: bool = True) -> Rows:
    draw = np.random.default_rng(seed)
    numbers = np.unique(draw.integers(0, OF, 12)) if present else np.empty(0)
    values = draw.choice([0.0, -0.0, 1.0, -1.0, 1e8, 1e-8, 3.1], (numbers.size, COLUMNS))
    return Rows(present, numbers.astype(np.uint32), values.astype(np.float32))


def array_of(rows: Rows | None = None) -> Any:
    array = np.zeros(words_of(OF, COLUMNS), np.float32)
    if rows is not None:
        write_rows(rows, array)
    return array


def payload_of(codec: RowsCodec, rows: Rows) -> Any:
    array = array_of(rows)
    out = np.empty(codec.payload_bound(array.size), np.uint8)
    made = out[: codec.finish(array, array.size, 0, array.size, 1, None, None, 1.0, STILL, out).payload_bytes]
    assert made.tobytes() == codec.reference_payload(array_of(rows), STILL)
    codec.validate(made, array.size)
    return made


def dense(rows: Rows) -> Any:
    out = np.zeros((OF, COLUMNS), np.float32)
    out[rows.numbers] = rows.values
    return out


def dense_sum(terms: list[Any]) -> Any:
    """In eights, left to right, then the eights."""
    eights = []
    for first in range(0, len(terms), 8):
        total = terms[first]
        for term in terms[first + 1 : first + 8]:
            total = total + term
        eights.append(total)
    total = eights[0]
    for more in eights[1:]:
        total = total + more
    return total


@pytest.mark.parametrize("values", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9, 20])
def test_a_sum_has_the_bits_of_the_dense_one_and_the_rows_of_any_rank(ranks: int, values: str) -> None:
    codec, given = codec_of(values), [drawn(seed, present=seed % 5 != 1) for seed in range(ranks)]
    payloads = [payload_of(codec, rows) for rows in given]
    array = array_of()
    for first in range(0, ranks, 8):
        codec.fold(payloads[first : first + 8], array.size, 0, array.size, array, first == 0)
    total = read_rows(array, COLUMNS)
    wanted = dense_sum([codec.reference_elements(payload.tobytes(), array.size) for payload in payloads])
    assert total.numbers.tolist() == sorted({int(number) for rows in given for number in rows.numbers})
    assert dense(total).tobytes() == wanted.tobytes()
    assert total.present


def test_the_bytes_are_those_of_the_table() -> None:
    rows = Rows(True, np.array([2, 7], np.uint32), np.arange(6, dtype=np.float32).reshape(2, 3))
    wanted = np.array([2, 1, 2, 7], np.uint32).tobytes() + np.arange(6, dtype=np.float32).tobytes()
    assert payload_of(codec_of(), rows).tobytes() == wanted
    assert payload_of(codec_of("float16"), rows).tobytes() == wanted[:16] + np.arange(6, dtype=np.float16).tobytes()
    assert payload_of(codec_of(), drawn(0, present=False)).tobytes() == bytes(8)


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_any_byte_flip_is_refused_or_decodes_in_bounds(values: str) -> None:
    codec, numel = codec_of(values), words_of(OF, COLUMNS)
    payload = payload_of(codec, drawn(3))
    for place in range(payload.size):
        for flip in (0x01, 0x80, 0xFF):
            torn, out = payload.copy(), array_of()
            torn[place] ^= flip
            try:
                codec.validate(torn, numel)
            except PayloadError:
                continue
            codec.decode(torn, numel, 0, numel, out)
            assert (read_rows(out, COLUMNS).numbers < OF).all()
    for length in range(payload.size):
        with pytest.raises(PayloadError):
            codec.validate(payload[:length], numel)


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(PayloadError, match="sparse gradient of 3 rows, at most 2 travel as one"):
        write_rows(Rows(True, np.arange(3, dtype=np.uint32), np.ones((3, COLUMNS), np.float32)), np.zeros(words_of(2, COLUMNS), np.float32))


def test_its_text_is_read_as_it_is_written_and_users_are_told_what_to_write_instead() -> None:
    for values in ("float32", "bfloat16"):
        assert codec_of(values).canonical == parse_scheme(codec_of(values).canonical).canonical
    with pytest.raises(
        CodecError, match=r"codec rows is for sparse gradients alone: name their parameters in DistributedOptimizer\(\.\.\., sparse="
    ):
        parse_codec("rows")
    with pytest.raises(CodecError, match="parameter values is float32 or bfloat16 or float16, not 'float64'"):
        codec_of("float64")
