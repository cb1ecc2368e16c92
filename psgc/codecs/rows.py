"""The codec of sparse gradients: the rows of an embedding that this step has used, by their numbers, and their values.

| offset  | type                   | meaning                                                                 |
|---------|------------------------|-------------------------------------------------------------------------|
| 0       | u32                    | n: how many rows                                                        |
| 4       | u32                    | 1 if there is a gradient (perhaps of no rows), else 0                   |
| 8       | u32 [n]                | the rows' numbers, ascending, each below ``of``                         |
| 8 + 4 n | dtype [n * columns]    | their values, row by row: ``values``, float32, bfloat16 or float16      |

Owns this payload, and the array that front ends hand over instead of a dense gradient and get back: the same in words of float32, whose values are always
float32. The sum's rows are those of any rank, ascending. Each is added as dense gradients are, in the order of ranks, ranks that lack it counting as +0, so
that the bits are those of the dense sum.

Users do not name it: they name the parameters (``DistributedOptimizer(sparse=...)``), whose shape is its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from psgc.codecs.codec import DTYPES, F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.floats import reference_narrow_bf16, reference_widen_bf16
from psgc.codecs.common.parameters import read_choice, read_whole, with_defaults
from psgc.errors import CodecError, PayloadError

HEAD_BYTES: Final = 8
HEAD_WORDS: Final = 2
WORD: Final = 4
MOST_ROWS: Final = (1 << 32) - 1
VALUES: Final = ("float32", "bfloat16", "float16")


class Rows(NamedTuple):
    """present: whether there is a gradient; numbers: of its rows, u32 [n], ascending; values: float32 [n, columns]."""

    present: bool
    numbers: npt.NDArray[np.uint32]
    values: F32


def words_of(rows: int, columns: int) -> int:
    """Length of the array that has room for so many rows."""
    return HEAD_WORDS + rows * (1 + columns)


def read_rows(array: F32, columns: int) -> Rows:
    """What is in the array, as views of it."""
    words = array.view(np.uint32)
    count = int(words[0])
    first = HEAD_WORDS + count
    return Rows(bool(words[1]), words[HEAD_WORDS:first], array[first : first + count * columns].reshape(count, columns))


def write_rows(rows: Rows, array: F32) -> None:
    """Put them into the array. Raises PayloadError for more than it has room for."""
    count, columns = rows.values.shape
    if words_of(count, columns) > array.size:
        raise PayloadError(f"sparse gradient of {count} rows, at most {(array.size - HEAD_WORDS) // (1 + columns)} travel as one")
    words, first = array.view(np.uint32), HEAD_WORDS + count
    words[0], words[1] = count, rows.present
    words[HEAD_WORDS:first] = rows.numbers
    array[first : first + rows.values.size] = rows.values.reshape(-1)


def added(terms: Sequence[Rows]) -> Rows:
    """Their sum, left to right, with the bits that the sum of the dense gradients has."""
    if len(terms) == 1:
        return terms[0]
    numbers, times = np.unique(np.concatenate([term.numbers for term in terms]), return_counts=True)
    values = np.zeros((numbers.size, terms[0].values.shape[1]), np.float32)
    for place, term in enumerate(terms):
        where = np.searchsorted(numbers, term.numbers)
        if place:
            values[where] += term.values
        else:
            values[where] = term.values
    values[times < len(terms)] += np.float32(0)  # those who lack the row have +0 there, so that a sum of -0 alone becomes +0
    return Rows(any(term.present for term in terms), numbers, values)


class RowsCodec(Codec):
    """See the module's text. of: rows of the parameter; columns: elements of each; values: the parameter's dtype."""

    name = "rows"
    codec_id = 33
    dtypes = ("float32",)
    chunk = 0
    unbiased = True
    flags_nonfinite = False
    advice = "sparse gradients: the rows of an embedding that a step has used"
    defaults: ClassVar[Mapping[str, str]] = {"of": "", "columns": "", "values": "float32"}

    def __init__(self, dtype: str, of: int, columns: int, values: str) -> None:
        super().__init__(dtype)
        self.of, self.columns, self.values = of, columns, values
        self._item: np.dtype[Any] = np.dtype(DTYPES[values])

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        if not given["of"] or not given["columns"]:
            raise CodecError("codec rows is for sparse gradients alone: name their parameters in DistributedOptimizer(..., sparse=[...])")
        of, columns = (read_whole(cls, key, given[key], 1, MOST_ROWS) for key in ("of", "columns"))
        return cls(dtype, of, columns, read_choice(cls, "values", given["values"], VALUES))

    @property
    def parameters(self) -> dict[str, str]:
        values = {} if self.values == "float32" else {"values": self.values}
        return {"columns": str(self.columns), "of": str(self.of)} | values

    def _bytes_of(self, rows: int) -> int:
        return int(HEAD_BYTES + rows * (WORD + self.columns * self._item.itemsize))

    def payload_bound(self, numel: int) -> int:
        return self._bytes_of(max(numel - HEAD_WORDS, 0) // (1 + self.columns))

    def validate(self, payload: Bytes, numel: int) -> None:
        if payload.size < HEAD_BYTES:
            raise PayloadError(f"rows payload of {payload.size} bytes, at least {HEAD_BYTES} expected")
        count, present = payload[:HEAD_BYTES].view(np.uint32).tolist()
        if payload.size != self._bytes_of(count) or payload.size > self.payload_bound(numel) or present > 1 or count > count * present:
            raise PayloadError(
                f"rows payload of {payload.size} bytes says it has {count} rows; {self._bytes_of(count)} bytes for these, and at most "
                f"{self.payload_bound(numel)} expected"
            )
        numbers = self._numbers(payload)
        if count and (int(numbers[-1]) >= self.of or not (numbers[1:] > numbers[:-1]).all()):
            raise PayloadError(f"rows payload: its {count} rows are not ascending numbers below {self.of}")

    @staticmethod
    def _numbers(payload: Bytes) -> npt.NDArray[np.uint32]:
        count = int(payload[:WORD].view(np.uint32)[0])
        return payload[HEAD_BYTES : HEAD_BYTES + WORD * count].view(np.uint32)

    def rows_of(self, payload: Bytes) -> Rows:
        """What a payload has that ``validate`` has passed."""
        numbers = self._numbers(payload)
        items = np.ascontiguousarray(payload[HEAD_BYTES + WORD * numbers.size :]).view(self._item)
        wide = reference_widen_bf16(items) if self.values == "bfloat16" else items.astype(np.float32, copy=False)
        return Rows(bool(payload[WORD]), numbers, wide.reshape(numbers.size, self.columns))

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        rows = read_rows(grad, self.columns)
        payload_bytes, first = self._bytes_of(rows.numbers.size), HEAD_BYTES + WORD * rows.numbers.size
        out[:first] = grad.view(np.uint8)[:first]  # numbers are the same in both
        out[first:payload_bytes].view(np.uint8)[:] = self._narrow(rows.values).view(np.uint8)
        return Encoded(payload_bytes, nonfinite=False)

    def _narrow(self, values: F32) -> Array:
        if self.values == "bfloat16":
            return reference_narrow_bf16(values.reshape(-1))
        with np.errstate(over="ignore"):
            return values.reshape(-1).astype(self._item, copy=False)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        self.fold([payload], numel, lo, hi, out, True)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        total = added([self.rows_of(payload) for payload in payloads])
        write_rows(total if fresh else added([read_rows(acc, self.columns), total]), acc)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        if divisor != 1:
            read_rows(acc, self.columns).values[:] /= np.float32(divisor)
        return self.encode(acc, None, rescale, stream, out)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        rows = read_rows(p, self.columns)
        return p.tobytes()[: HEAD_BYTES + WORD * rows.numbers.size] + self._narrow(rows.values).tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Any:
        """The dense gradient, float32 [of, columns], which is what a sum of payloads is held against."""
        rows = self.rows_of(np.frombuffer(payload, np.uint8))
        dense = np.zeros((self.of, self.columns), np.float32)
        for number, values in zip(rows.numbers.tolist(), rows.values, strict=True):
            dense[number] = values
        return dense
