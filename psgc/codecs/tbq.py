"""The `tbq` codec: an element of at least a threshold tau is sent as -tau or +tau; the others wait in the residual until they are as large.

Payload: as `blocks` says, in blocks of 256 whose scale is tau, with codes -1, 0 and 1 of 2 bits. A block with NaN or infinity has scale 0 and
codes 0. tau is the same number in every block.

Owns the threshold and the choice. Feedback is built in (without it the method would lose all small elements), so there is no parameter ``ef``.
A fixed tau is no contraction: a block may send nothing, and an element that grows by more than tau a step is never caught up with. The codec
is for gradients whose size is known, as in the paper; where it is not, use `onebit`, which scales by the mean and sends half as much.
Source: Strom 2015 (Scalable distributed DNN training), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.common.bits import INFINITY_BITS, top_bits, view_f32, view_u8
from psgc.codecs.common.chunks import ChunkFormat
from psgc.codecs.common.parameters import read_float, with_defaults, write_float
from psgc.codecs.jit.kernel import helper
from psgc.codecs.quantize.blocks import block_reading_format, planar_codes, reference_pack
from psgc.codecs.quantize.integers import IntegerCodec, integer_value
from psgc.codecs.quantize.rows import CodeWords
from psgc.errors import CodecError

_BLOCK: Final = 256
_BITS: Final = 2
_LEAST_TAU: Final = 1e-30
_MOST_TAU: Final = 1e30


@helper
def _code(value: Any, tau: Any, limits: Any, draws: Any) -> Any:
    above, below = value >= tau, value <= -tau
    return np.uint32(np.int32(above) - np.int32(below))


_CODES: Final = planar_codes(_BITS, _code, integer_value, CodeWords(_BITS))
_WRITE_CODES: Final = _CODES.write


@helper
def _write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, draws: Any) -> Any:
    blocks, scratch, most = -(-numel // _BLOCK), np.empty(_BLOCK, np.uint8), np.uint32(0)
    scales = view_f32(payload, 4 * (start // _BLOCK), -(-p.size // _BLOCK))
    for number in range(scales.size):
        low = number * _BLOCK
        values = view_f32(p, low, min(_BLOCK, p.size - low))
        codes = view_u8(payload, 4 * blocks + (start + low) * _BITS // 8, (values.size * _BITS + 7) // 8)
        top = top_bits(values)
        most = max(most, top)
        tau = settings[2] if top < INFINITY_BITS else np.float32(0)
        scales[number] = tau
        _WRITE_CODES(values, tau if tau > 0 else np.float32(np.nan), codes, scratch, settings, draws)
    return most < INFINITY_BITS


_FORMAT: Final = block_reading_format(_BITS, _BLOCK, _CODES, _write)


class TbqCodec(IntegerCodec):
    """2.125 bits an element."""

    name = "tbq"
    codec_id = 12
    advice = "one fixed step for gradients whose size is known and steady: set tau to it; else onebit, which sends half as much"
    bits = _BITS
    block = _BLOCK
    top_code = 1
    defaults: ClassVar[dict[str, str]] = {"tau": "1"}

    def __init__(self, dtype: str = "float32", *, tau: float = 1.0) -> None:
        super().__init__(dtype, ef=True)
        self._tau = np.float32(tau)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        tau = with_defaults(cls, parameters)["tau"]
        if tau == "auto":
            raise CodecError(
                "codec tbq: tau=auto is no more; give tau the size of the gradients that are to be sent, or use onebit, which scales by itself"
            )
        return cls(dtype, tau=read_float(cls, "tau", tau, _LEAST_TAU, _MOST_TAU))

    @property
    def parameters(self) -> dict[str, str]:
        tau = write_float(float(self._tau))
        return {} if tau == self.defaults["tau"] else {"tau": tau}

    def contraction(self, numel: int) -> float | None:
        return None

    @functools.cached_property
    def settings(self) -> F32:  # type: ignore[override]
        return np.array([self.top_code, self.least_code, self._tau], np.float32)

    @property
    def chunk_format(self) -> ChunkFormat:
        return _FORMAT

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        scales, packed = [], []
        for start in range(0, p.size, _BLOCK):
            values = p[start : start + _BLOCK]
            tau = self._tau if np.isfinite(values).all() else np.float32(0)
            sent = (np.abs(values) >= tau) if tau else np.zeros(values.size, np.bool_)
            scales.append(tau)
            packed.append(reference_pack(np.where(sent, np.sign(values), 0), _BITS))
        return np.array(scales, np.float32).tobytes() + b"".join(packed)
