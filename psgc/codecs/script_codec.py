"""Codecs made of two functions of the training script: servers forward their payloads, and only workers can decode them.

| offset | type          | meaning                                                        |
|--------|---------------|----------------------------------------------------------------|
| 0      | u8 [any]      | what the function wrote, up to a bound that the trainer states |

Owns the text in which layouts speak of them:
``functions:bytes_per_element=...,extra_bytes=...,name=...``, from which servers learn how long payloads may be and nothing else. Knows
nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.feedback import FeedbackCodec, reference_corrected
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.payloads import reference_sum
from psgc.codecs.common.script_functions import LEAST_PER_ELEMENT, Functions, known_functions
from psgc.errors import CodecError, PayloadError


class ScriptCodec(FeedbackCodec):
    """See the module's text. On a server it has a bound, but no functions."""

    name = "functions"
    codec_id = 30
    chunk = 0
    defaults: ClassVar[dict[str, str]] = {"name": "", "bytes_per_element": "4.0", "extra_bytes": "4096", "ef": "0"}

    def __init__(self, dtype: str, *, functions_name: str, bound: tuple[float, int], ef: bool) -> None:
        super().__init__(dtype, ef=ef)
        self._name = functions_name
        self._per_element, self._extra = float(bound[0]), bound[1]
        self._functions = known_functions().get(functions_name)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        if not given["name"]:
            raise CodecError("codec functions: register functions with psgc.torch.register_functions and use the name given there")
        try:
            bound = float(given["bytes_per_element"]), int(given["extra_bytes"])
        except ValueError:
            bound = math.nan, 0
        if not (LEAST_PER_ELEMENT <= bound[0] < math.inf and bound[1] >= 0):
            raise CodecError(
                f"codec functions: parameters bytes_per_element and extra_bytes are {given['bytes_per_element']} and {given['extra_bytes']}; "
                f"numbers of at least {LEAST_PER_ELEMENT} and 0 expected"
            )
        return cls(dtype, functions_name=given["name"], bound=bound, ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        texts = {
            "name": self._name, "bytes_per_element": repr(self._per_element), "extra_bytes": str(self._extra), "ef": str(int(self.feedback)),
        }  # fmt: skip
        return {key: text for key, text in texts.items() if text != self.defaults[key]}

    def payload_bound(self, numel: int) -> int:
        return math.ceil(self._per_element * numel) + self._extra

    def validate(self, payload: Bytes, numel: int) -> None:
        if payload.size > self.payload_bound(numel):
            raise PayloadError(
                f"{self._name} payload of {numel} elements: {payload.size} bytes, at most {self.payload_bound(numel)} were declared"
            )

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        p = reference_corrected(grad, residual, rescale)
        finite = np.isfinite(p)
        all_finite = bool(finite.all())
        payload = self._here().compress(p if all_finite else np.where(finite, p, np.float32(0)))
        if payload.size > self.payload_bound(grad.size):
            raise CodecError(
                f"codec {self._name}: compress wrote {payload.size} bytes for {grad.size} elements, but at most "
                f"{self._per_element:g} an element and {self._extra} more were declared; register it with a higher bound"
            )
        out[: payload.size] = payload
        return Encoded(payload.size, not all_finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        out[:] = self._here().decompress(payload, numel)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            acc[:] = reference_sum([self._here().decompress(payload, numel) for payload in payloads], None if fresh else acc)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        residual[:] = reference_corrected(grad, residual, rescale) - self._here().decompress(payload, numel)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        raise NotImplementedError("servers forward what functions write")

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return self._here().compress(p.copy()).tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return self._here().decompress(np.frombuffer(payload, np.uint8), numel)

    def _here(self) -> Functions:
        if self._functions is None:
            raise CodecError(f"codec {self._name}: its functions are not registered in this process; register them before they are named")
        return self._functions
