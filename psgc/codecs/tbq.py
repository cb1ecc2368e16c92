"""The `tbq` codec: an element of at least a threshold tau is sent as -tau or +tau; the others wait in the residual until they are as large.

Payload: as `grouped` says, in groups of 256 whose scale is tau, with codes -1, 0 and 1 of 2 bits.

With ``tau=auto``, the default, tau is the mean |p| of the group, and at most max|p|. In float32, |p| / 256 are added in halves: elements j and
j + 128, then j and j + 64, and so on until one is left, which is multiplied with 256 / n for n elements. With a number, tau is that number in
every group. A group whose tau would be below the smallest normal float, and one with NaN or infinity, has tau 0 and codes 0.

Owns the threshold and the choice. Codes are dense, of fixed size: tau=auto sends 42 % of Gaussian values, for which positions would take
more bits than codes. Feedback is built in (what is not sent is not lost is the whole method), so there is no parameter ``ef``.

A tau of the mean leaves 0.344 of the square of Gaussian values; 1.12 times it, the best, leaves 0.340, and `onebit` 0.363. It always
contracts: sending an element takes tau * (2|p| - tau) >= tau * |p| off the square, and the largest is always sent, which is mean|p| * max|p|
>= ||p||**2 / n. A fixed tau has no such bound: a group may send nothing, and an element that grows by more than tau a step is never caught up
with. It is for gradients whose size is known, as in the paper.
Source: Strom 2015 (Scalable distributed DNN training), section 3; the automatic threshold is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.common.bits import f32_of_bits, view_f32, view_u8
from psgc.codecs.common.blocks import (
    INFINITY_BITS,
    LEAST_SCALE,
    GroupedCodec,
    group_readers,
    integer_value,
    planar_codes,
    reference_pack,
    top_bits,
)  # fmt: skip
from psgc.codecs.common.chunks import BlockFormat
from psgc.codecs.common.parameters import read_float, with_defaults, write_float
from psgc.codecs.common.rows import CodeWords
from psgc.codecs.jit.kernel import helper

GROUP: Final = 256
_BITS: Final = 2
_LEAST_TAU: Final = 1e-30
_MOST_TAU: Final = 1e30
_SHRINK: Final = np.float32(1 / GROUP)  # the sum of so many finite values, each times this, is finite


def reference_mean(magnitudes: F32) -> np.float32:
    """The mean of a group's magnitudes in the documented order."""
    sums = np.zeros(GROUP, np.float32)
    sums[: magnitudes.size] = magnitudes * _SHRINK
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return np.float32(sums[0] * (np.float32(GROUP) / np.float32(magnitudes.size)))


def reference_threshold(group: F32, given: np.float32) -> np.float32:
    """tau of one group; 0 given is auto."""
    if not np.isfinite(group).all():
        return np.float32(0)
    with np.errstate(over="ignore"):
        tau = given if given else min(reference_mean(np.abs(group)), np.abs(group).max())
    return tau if tau >= LEAST_SCALE else np.float32(0)


@helper
def _mean(values: Any, sums: Any) -> Any:
    for i in range(values.size):
        sums[i] = abs(values[i]) * _SHRINK
    for i in range(values.size, GROUP):
        sums[i] = np.float32(0)
    width = GROUP // 2
    while width > 0:
        high = view_f32(sums, width, width)
        for i in range(width):
            sums[i] += high[i]
        width //= 2
    return sums[0] * (np.float32(GROUP) / np.float32(values.size))


@helper
def _threshold(values: Any, top: Any, given: Any, sums: Any) -> Any:
    """tau of one group, whose largest magnitude has the bits ``top``; 0 given is auto."""
    if top >= INFINITY_BITS:
        return np.float32(0)
    tau = given if given > 0 else min(_mean(values, sums), f32_of_bits(top))
    return tau if tau >= LEAST_SCALE else np.float32(0)


@helper
def _code(value: Any, tau: Any, top: Any, least: Any, index: Any, before: Any, between: Any) -> Any:
    above, below = value >= tau, value <= -tau
    return np.uint32(np.int32(above) - np.int32(below))


_WRITE_CODES, _READ_CODES = planar_codes(_BITS, _code, integer_value)


@helper
def _write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, index: Any, before: Any, between: Any) -> Any:
    groups, sums, scratch, most = -(-numel // GROUP), np.empty(GROUP, np.float32), np.empty(GROUP, np.uint8), np.uint32(0)
    scales = view_f32(payload, 4 * (start // GROUP), -(-p.size // GROUP))
    for number in range(scales.size):
        low = number * GROUP
        values = view_f32(p, low, min(GROUP, p.size - low))
        codes = view_u8(payload, 4 * groups + (start + low) * _BITS // 8, (values.size * _BITS + 7) // 8)
        top = top_bits(values)
        most = max(most, top)
        tau = _threshold(values, top, settings[2], sums)
        scales[number] = tau
        _WRITE_CODES(values, tau if tau > 0 else np.float32(np.inf), codes, scratch, settings, index, before, between)
    return most < INFINITY_BITS


class TbqCodec(GroupedCodec):
    """2.125 bits an element."""

    name = "tbq"
    codec_id = 12
    advice = "one fixed step for gradients whose size is known and steady; onebit sends half as much without such knowledge"
    bits = _BITS
    group = GROUP
    top_code = 1
    defaults: ClassVar[dict[str, str]] = {"tau": "auto"}

    def __init__(self, dtype: str = "float32", *, tau: float | None = None) -> None:
        super().__init__(dtype, ef=True)
        self._tau = np.float32(tau or 0)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        tau = with_defaults(cls, parameters)["tau"]
        return cls(dtype, tau=None if tau == "auto" else read_float(cls, "tau", tau, _LEAST_TAU, _MOST_TAU, "auto"))

    @property
    def parameters(self) -> dict[str, str]:
        return {"tau": write_float(float(self._tau))} if self._tau else {}

    def contraction(self, numel: int) -> float | None:
        return None if self._tau else 1 / min(numel, GROUP)

    @functools.cached_property
    def settings(self) -> F32:  # type: ignore[override]
        return np.array([self.top_code, self.least_code, self._tau], np.float32)

    @property
    def block_format(self) -> BlockFormat:
        return _FORMAT

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        scales, packed = [], []
        for start in range(0, p.size, GROUP):
            values = p[start : start + GROUP]
            tau = reference_threshold(values, self._tau)
            sent = (np.abs(values) >= tau) if tau else np.zeros(values.size, np.bool_)
            scales.append(tau)
            packed.append(reference_pack(np.where(sent, np.sign(values), 0), _BITS))
        return np.array(scales, np.float32).tobytes() + b"".join(packed)


_FORMAT: Final = BlockFormat(_write, *group_readers(_BITS, GROUP, _READ_CODES, CodeWords(_BITS)))
