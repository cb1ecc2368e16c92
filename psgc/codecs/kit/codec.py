"""``KitCodec``: a whole codec from two functions, ``compress`` and ``expand``, written in operators.

Owns everything that such codecs share: parameters, slices, feedback, means and sums, the NaN flag, payloads and their checks. The
same two functions, run with the operators' NumPy definitions over the whole part, are the codec's reference.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import BLOCK, F32, PLUGIN_ID, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.feedback import FeedbackCodec
from psgc.codecs.common.parameters import MOMENTUM_DEFAULTS, read_switch, with_defaults
from psgc.codecs.kit.cpu import CpuOps, correct
from psgc.codecs.kit.fields import Field, FieldLayout
from psgc.codecs.kit.ops import REVISION, Ops, Random, Vector
from psgc.codecs.kit.values import Value, declared
from psgc.codecs.scheme import slices
from psgc.errors import CodecError, PayloadError

_CPU: Final = CpuOps()
_DEFINITION: Final = Ops()
_SLICE: Final = 65536


class KitCodec(FeedbackCodec):
    """Subclasses give ``name``, parameters as class attributes (``Whole``, ``Real``, ``Choice``) and the methods ``fields``, ``compress``
    and ``expand``, which depend on nothing but the parameters. ``ef`` is a parameter of each.

    blockwise: the encoding of an element depends only on its block of 4096 elements (blocks begin at multiples of 4096). The codec then works
    in slices that stay in cache, and cutting a bucket changes nothing. Fields of such a codec have exact counts that add up over blocks.
    ef_by_default: whether the codec has error feedback unless the user says ``ef=0``.
    """

    blockwise: ClassVar[bool] = False
    ef_by_default: ClassVar[bool] = True
    revision: ClassVar[str] = REVISION
    cuda_made_by: ClassVar[str] = "psgc.cuda.kit.codec:kit_side"  # for every subclass: see `psgc.codecs.backends`
    _declared: ClassVar[Mapping[str, Value[Any]]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._declared = declared(cls)
        if reserved := {"ef", *MOMENTUM_DEFAULTS} & cls._declared.keys():
            raise CodecError(f"codec {cls.__name__}: parameter {min(reserved)} is one that every codec takes; give yours another name")
        cls.defaults = {name: value.write(value.default) for name, value in cls._declared.items()} | {"ef": str(int(cls.ef_by_default))}
        cls.chunk = _SLICE if cls.blockwise else 0
        if "name" in vars(cls) and "codec_id" not in vars(cls):
            cls.codec_id = PLUGIN_ID | zlib.crc32(cls.name.encode()) & (PLUGIN_ID - 1)

    def __init__(self, dtype: str = "float32", *, ef: bool | None = None, **values: Any) -> None:
        super().__init__(dtype, ef=self.ef_by_default if ef is None else ef)
        with_defaults(type(self), values)  # for the names alone
        self._values = {name: value.default for name, value in self._declared.items()} | values
        self.layout = functools.lru_cache(maxsize=16)(lambda numel: FieldLayout(self.name, self.fields(numel), numel))
        self.prepare()
        if self.blockwise:
            self._check_blocks()

    def prepare(self) -> None:
        """Called once the parameters are known: may refuse them (CodecError), and may set ``self.unbiased``."""

    def fields(self, numel: int) -> Mapping[str, Field]:
        """The payload of ``numel`` elements, by the fields' names."""
        raise NotImplementedError

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        """The fields of p, which is float32 and finite; in a blockwise codec, of a slice."""
        raise NotImplementedError

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        """The ``numel`` float32 elements that the fields stand for. What overflows becomes the largest finite number, NaN becomes 0."""
        raise NotImplementedError

    def check(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> str:
        """Why ``expand`` cannot take these fields, although each is within its bounds; empty if it can."""
        return ""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        ef = read_switch(cls, "ef", given.pop("ef"))
        return cls(dtype, ef=ef, **{name: cls._declared[name].read(cls.name, text) for name, text in given.items()})

    @property
    def parameters(self) -> dict[str, str]:
        texts = {name: value.write(self._values[name]) for name, value in self._declared.items()} | {"ef": str(int(self.feedback))}
        return {name: text for name, text in texts.items() if text != self.defaults[name]}

    def _check_blocks(self) -> None:
        whole, block, rest = (self.layout(numel) for numel in (3 * BLOCK + 9, BLOCK, 9))
        for name, field in whole.fields.items():
            counts = whole.count(name), block.count(name), rest.count(name)
            if not whole.fixed or counts[0] != 3 * counts[1] + counts[2] or counts[1] * field.bits % 8:
                raise CodecError(
                    f"codec {self.name} is blockwise, but field {name!r} has {counts[0]} elements for {3 * BLOCK + 9} values, "
                    f"{counts[1]} for {BLOCK} and {counts[2]} for 9: exact counts that add up, in whole bytes, are expected"
                )

    def payload_bound(self, numel: int) -> int:
        return self.layout(numel).bound

    def validate(self, payload: Bytes, numel: int) -> None:
        layout = self.layout(numel)
        layout.validate(_CPU, payload)
        if type(self).check is not KitCodec.check:
            wrong = self.check(_CPU, layout.read(_CPU, payload), numel)
            if wrong:
                raise PayloadError(f"{self.name} payload of {numel} elements: {wrong}")

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        numel, written, finite = grad.size, 0, True
        for lo, hi in slices(self, numel):
            p, good = correct(grad[lo:hi], 1, None if residual is None else residual[lo:hi], rescale)
            written = self._write(_CPU, p, stream, numel, lo, out)
            finite &= good
        return Encoded(written, not finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        out[:] = self._read(_CPU, payload, numel, lo, hi)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        total = acc if fresh else np.empty(hi - lo, np.float32)
        total[:] = self._read(_CPU, payloads[0], numel, lo, hi)
        with np.errstate(over="ignore", invalid="ignore"):
            for payload in payloads[1:]:
                total += self._read(_CPU, payload, numel, lo, hi)
            if not fresh:
                acc += total

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        p, finite = correct(acc, divisor, residual, rescale)
        written = self._write(_CPU, p, stream, numel, lo, out)
        if residual_out is not None:
            np.subtract(p, self._read(_CPU, out[:written], numel, lo, hi), out=residual_out)
        return Encoded(written, not finite)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        p, _ = correct(grad, 1, residual, rescale)
        np.subtract(p, self._read(_CPU, payload, numel, lo, hi), out=residual)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        out = np.zeros(self.payload_bound(p.size), np.uint8)
        return out[: self._write(_DEFINITION, np.where(np.isfinite(p), p, np.float32(0)), stream, p.size, 0, out)].tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return self._read(_DEFINITION, np.frombuffer(payload, np.uint8), numel, 0, numel)

    def warm(self) -> None:
        """Encode, check and fold one block, which compiles every operator that this codec calls."""
        p = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
        out, stream = np.empty(self.payload_bound(BLOCK), np.uint8), Stream(0, 0, 0, 0)
        payload = out[: self.encode(p, p, 1.0, stream, out).payload_bytes].copy()
        self.validate(payload, BLOCK)
        self.fold([payload], BLOCK, 0, BLOCK, p, True)

    def _write(self, ops: Ops, p: F32, stream: Stream, numel: int, lo: int, out: Bytes) -> int:
        """Write p, the elements from ``lo`` on, to its place in the whole part's payload; returns that payload's length."""
        with np.errstate(all="ignore"):
            values = self.compress(ops, p, Random(ops, stream, lo, p.size))
        if p.size == numel:
            return self.layout(numel).write(ops, values, out)
        self.layout(p.size).check(values)
        return self.layout(numel).write_slice(ops, self._bytes_before(lo), values, out)

    def _read(self, ops: Ops, payload: Bytes, numel: int, lo: int, hi: int) -> F32:
        """Elements ``[lo, hi)``."""
        layout = self.layout(numel)
        if hi - lo == numel:
            fields = layout.read(ops, payload)
        else:
            fields = layout.read_slice(ops, self._bytes_before(lo), self.layout(hi - lo), payload)
        with np.errstate(all="ignore"):
            elements = self.expand(ops, fields, hi - lo)
        if elements.dtype != np.float32 or elements.shape != (hi - lo,):
            raise CodecError(f"codec {self.name}: expand gave {elements.dtype}{list(elements.shape)}, not float32[{hi - lo}]")
        saturated: F32 = ops.saturate(elements)
        return saturated

    def _bytes_before(self, lo: int) -> dict[str, int]:
        """Bytes of each field that belong to the elements before ``lo``, a multiple of BLOCK."""
        block = self.layout(BLOCK)
        return {name: lo // BLOCK * block.count(name) * field.bits // 8 for name, field in block.fields.items()}
