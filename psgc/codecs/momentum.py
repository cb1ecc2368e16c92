"""Momentum before compression, and residuals in eight bits: what a worker can keep between steps besides a float32 residual.

Parameters of any push codec with feedback, beside the codec's own (``topk:k=0.001,momentum=dgc``, ``int4:residual=int8``):

| parameter  | values                | meaning                                                                             |
|------------|-----------------------|-------------------------------------------------------------------------------------|
| `momentum` | `none`, `nesterov`, `dgc` | what is compressed in the gradient's place (below)                              |
| `mu`       | 0 <= mu < 1, 0.9      | momentum's factor                                                                   |
| `clip`     | >= 0, 0 is off        | each rank first scales its part's gradient g to a norm of at most clip / sqrt(workers) |
| `residual` | `float32`, `int8`     | how the residual is kept (see psgc/worker/residuals/residual.py)                              |

    nesterov   u <- mu u + g     g + mu u is compressed. The trainer's optimizer then has no momentum of its own.
    dgc        u <- mu u + g     u is compressed; where something was sent u becomes 0 (factor masking). The optimizer is plain SGD.

dgc is for codecs that send some elements and nothing of the others. With a codec that sends every element, it would forget all momentum in each step.

Owns these passes and each part's velocity u, float32, in gradient units. u advances when a step's result is applied, so that a step
that this rank skipped or that met a NaN leaves it unchanged. If the gradient's unit changes (another loss scale), u is rescaled like the residual:
u <- mu (f u) + g, each operation rounded to float32. The limit of ``clip`` is in the units of the gradients that are pushed. The norm is that of one
part, with squares summed in float64 as `sums` says.
Source: Lin et al. 2018 (DGC), sections 3.1 to 3.3; Zheng et al. 2019 (dist-EF-blockSGDM) and BytePS for Nesterov's form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from psgc.codecs.codec import BLOCK, F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.parameters import MOMENTUM_DEFAULTS
from psgc.codecs.common.sums import squares_kernel, sum_squares
from psgc.codecs.common.texts import join_text
from psgc.codecs.scheme import BucketContext, ResidualDtype, Round, Scheme, SchemeState
from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import CodecError

Kind = Literal["none", "nesterov", "dgc"]


@dataclass(frozen=True, slots=True)
class Momentum:
    """The parameters above."""

    momentum: Kind = "none"
    mu: float = 0.9
    clip: float = 0.0
    residual: ResidualDtype = "float32"

    @property
    def parameters(self) -> dict[str, str]:
        """In canonical text, those at their default left out."""
        given = {"momentum": self.momentum, "mu": _text(self.mu), "clip": _text(self.clip), "residual": self.residual}
        return {key: value for key, value in given.items() if value != MOMENTUM_DEFAULTS[key]}


def _text(number: float) -> str:
    return np.format_float_positional(number, trim="-")


def split_momentum(parameters: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split parameters into a push codec's own and those of momentum."""
    own = {key: value for key, value in parameters.items() if key not in MOMENTUM_DEFAULTS}
    return own, {key: value for key, value in parameters.items() if key in MOMENTUM_DEFAULTS}


def read_momentum(name: str, given: Mapping[str, str]) -> Momentum:
    """Momentum from its text. Raises CodecError naming codec and parameter."""
    text = {**MOMENTUM_DEFAULTS, **given}
    for key, choices in (("momentum", ("none", "nesterov", "dgc")), ("residual", ("float32", "int8"))):
        if text[key] not in choices:
            raise CodecError(
                f"codec {name}: parameter {key} is one of {', '.join(choices)}, not {text[key]!r}{did_you_mean(text[key].lower(), choices)}"
            )
    if text["momentum"] == "none" and "mu" in given:
        raise CodecError(f"codec {name}: parameter mu needs momentum=nesterov or momentum=dgc")
    mu, clip = (_number(name, key, text[key]) for key in ("mu", "clip"))
    if not mu < 1:
        raise CodecError(f"codec {name}: parameter mu is a number from 0 to below 1, not {text['mu']!r}")
    return Momentum(cast("Kind", text["momentum"]), mu, clip, cast("ResidualDtype", text["residual"]))


def _number(name: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CodecError(f"codec {name}: parameter {key} is a finite number >= 0, not {text!r}")
    return value


class MomentumScheme(Scheme):
    """One round by two codecs, or by relay, with momentum on the worker. Servers see an ordinary round."""

    def __init__(self, inner: Scheme, momentum: Momentum, context: BucketContext) -> None:
        (round_,) = inner.rounds(BLOCK)
        push = round_.pair.push
        if not inner.feedback:
            raise CodecError(f"codec {push.canonical} keeps no residual, which {', '.join(momentum.parameters)} needs; use one with ef=1")
        if momentum.momentum == "dgc" and not push.sparse:
            raise CodecError(
                f"codec {push.canonical}: momentum=dgc forgets the momentum of what was sent, and this codec sends something of every element, so that "
                f"none would be left; use momentum=nesterov, or a codec that sends some elements alone, as topk does"
            )
        self.inner, self.push, self.momentum = inner, push, momentum
        self.clip = momentum.clip / math.sqrt(context.workers)
        self.residual_dtype = momentum.residual
        self.whole = inner.whole

    @property
    def canonical(self) -> str:
        text = join_text(self.push.canonical.partition(":")[0], {**self.push.parameters, **self.momentum.parameters})
        _, slash, pull = self.inner.canonical.partition("/")
        return f"{text}{slash}{pull}"

    @property
    def feedback(self) -> bool:
        return True

    @property
    def array_dtype(self) -> Any:
        return self.inner.array_dtype

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        return self.push, *self.inner.device_codecs

    @property
    def flags_nonfinite(self) -> bool:
        return self.inner.flags_nonfinite

    def rounds(self, numel: int) -> tuple[Round, ...]:
        return self.inner.rounds(numel)

    def warm(self) -> None:
        super().warm()
        if self.clip:
            squares_kernel()

    def new_state(self, numel: int) -> SchemeState:
        state = self.inner.new_state(numel)
        if self.momentum.momentum == "none" and not self.clip:
            return state
        return MomentumState(state, self.push, numel, self.momentum, self.clip)


class MomentumState(SchemeState):
    """Compresses the velocity, or the gradient moved along it. velocity: float32 [numel], empty until the first step is applied."""

    def __init__(self, inner: SchemeState, push: Codec, numel: int, momentum: Momentum, clip: float) -> None:
        self.rounds = inner.rounds
        self._inner, self._push, self._numel, self._momentum, self._clip = inner, push, numel, momentum, clip
        self.velocity: F32 = np.zeros(0, np.float32)

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        _, moved = self._advanced(grad, rescale)
        return self._inner.encode(index, moved, residual, rescale, stream, out)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        if residual is None:  # this rank skipped: nothing of its own to remember
            self._inner.apply(payload, sent, target, residual, rescale)
            return
        velocity, moved = self._advanced(target, rescale)
        target[:] = moved  # what was encoded, against which the residual is committed
        if self._momentum.momentum == "dgc":
            velocity[self._decoded(sent[0]) != 0] = 0
        self._inner.apply(payload, sent, target, residual, rescale)
        self.velocity = velocity

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        self._inner.add_back(sent, residual)

    @property
    def saved(self) -> F32 | None:
        return None if self._momentum.momentum == "none" else np.resize(self.velocity, self._numel)

    def restore(self, saved: F32) -> None:
        self.velocity = saved.copy()

    def _advanced(self, grad: Array, rescale: float) -> tuple[F32, F32]:
        """The next velocity, and the values to compress. rescale: the gradient's present unit divided by the velocity's."""
        g = clipped(grad, self._clip)
        if self._momentum.momentum == "none":
            return self.velocity, g
        mu = np.float32(self._momentum.mu)
        velocity = g + mu * (np.float32(rescale) * self.velocity) if self.velocity.size else np.array(g, np.float32)
        if self._momentum.momentum == "dgc":
            return velocity, velocity
        return velocity, g + mu * velocity

    def _decoded(self, payload: Bytes) -> F32:
        out = np.empty(self._numel, np.float32)
        self._push.decode(payload, self._numel, 0, self._numel, out)
        return out


def clipped(grad: F32, limit: float) -> F32:
    """grad scaled to an L2 norm of at most ``limit``; as it is for limit 0, and where it is not finite."""
    if not limit:
        return grad
    norm = math.sqrt(sum_squares(grad))
    return grad if norm <= limit or not np.isfinite(norm) else np.asarray(grad * np.float32(limit / norm), np.float32)
