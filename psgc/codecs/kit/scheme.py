"""``KitScheme``: a method that keeps state between steps, from a few functions written in operators, around codecs that exist.

Owns everything that is alike in such methods: parameters, the round, the residual, the state and its unit, checkpoints. Payloads are those of
the two codecs that the author names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import F32, FLOATS, Array, Bytes, Codec, CodecPair, Encoded, Stream
from psgc.codecs.common.parameters import with_defaults
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.kit.ops import REVISION, Ops, Vector
from psgc.codecs.kit.values import Value, declared
from psgc.codecs.scheme import BucketContext, Round, Scheme, SchemeState, check_part, slices
from psgc.errors import CodecError

_CPU: Final = CpuOps()


class KitScheme(Scheme):
    """Subclasses give ``name``, parameters as class attributes (``Whole``, ``Real``, ``Choice``) and the methods below.

    A step on each worker: ``p = outgoing(gradient, residual)`` is encoded with the push codec; the servers take the mean (or sum) of what
    they decode, and answer with the pull codec; then the residual becomes ``left_over`` and the gradient ``incoming``. Vectors are float32
    and as long as the part. The residual and the state begin as zeros, are kept in the gradient's unit (psgc rescales them where the loss
    scale changes) and are saved with checkpoints.

    keeps_state: whether there is a state besides the residual. It may follow from answers alone: a worker that has no gradient in a step
    gets the answer all the same.
    """

    keeps_state: ClassVar[bool] = False
    revision: ClassVar[str] = REVISION
    cuda_made_by: ClassVar[str] = "psgc.cuda.kit.scheme:kit_state"  # for every subclass: see `psgc.codecs.backends`
    _declared: ClassVar[Mapping[str, Value[Any]]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._declared = declared(cls)
        cls.defaults = {name: value.write(value.default) for name, value in cls._declared.items()}

    def __init__(self, context: BucketContext = BucketContext(), **values: Any) -> None:  # noqa: B008 - immutable
        with_defaults(type(self), values)  # for the names alone
        if context.dtype not in FLOATS:
            raise CodecError(f"codec {self.name} carries {', '.join(FLOATS)}, not {context.dtype}; use 'none' for this tensor")
        self._values = {name: value.default for name, value in self._declared.items()} | values
        from psgc.codecs.registry import parse_pair

        self._pair = parse_pair("/".join(self.codecs()), context.dtype)
        for codec in (self._pair.push, self._pair.pull):
            if (codec.array_dtype != np.float32 and codec.dtype == "float32") or codec.feedback:
                raise CodecError(
                    f"codec {self.name}: its codecs keep no residual of their own, and carry floats; {codec.canonical} cannot be one"
                )

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        return self._pair.push, self._pair.pull

    def codecs(self) -> tuple[str, str]:
        """Texts of the push and the pull codec, both without feedback of their own (``ef=0``). May depend on the parameters."""
        raise NotImplementedError

    def outgoing(self, ops: Ops, gradient: Vector, residual: Vector) -> Vector:
        """The values that are encoded."""
        return gradient + residual

    def left_over(self, ops: Ops, p: Vector, residual: Vector, sent: Vector) -> Vector:
        """The residual after a step; p: what was encoded, sent: what that payload decodes to."""
        return p - sent

    def incoming(self, ops: Ops, answer: Vector, state: Vector) -> tuple[Vector, Vector]:
        """The gradient that the optimizer gets, and the new state (without one: whatever ``state`` is)."""
        return answer, state

    def put_back(self, ops: Ops, residual: Vector, sent: Vector) -> Vector:
        """The residual where the trainer threw the last step's result away."""
        return residual + sent

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], context: BucketContext) -> Scheme:
        given = with_defaults(cls, parameters)
        return cls(context, **{name: cls._declared[name].read(cls.name, text) for name, text in given.items()})

    @property
    def parameters(self) -> dict[str, str]:
        texts = {name: value.write(self._values[name]) for name, value in self._declared.items()}
        return {name: text for name, text in texts.items() if text != self.defaults[name]}

    @property
    def feedback(self) -> bool:
        return True

    @property
    def array_dtype(self) -> Any:
        return np.float32

    def rounds(self, numel: int) -> tuple[Round, ...]:
        return (Round(self._pair, numel),)

    def new_state(self, numel: int) -> SchemeState:
        check_part(self.canonical, numel)
        return _KitState(self, self._pair, numel)


class _KitState(SchemeState):
    """unit: the rescale that the state has taken already since the residual was last committed."""

    def __init__(self, scheme: KitScheme, pair: CodecPair, numel: int) -> None:
        self.rounds = (Round(pair, numel),)
        self._scheme, self._pair, self._numel = scheme, pair, numel
        self._state = np.zeros(numel if scheme.keeps_state else 0, np.float32)
        self._unit = 1.0

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        before = np.zeros(self._numel, np.float32) if residual is None else np.float32(rescale) * residual
        return self._pair.push.encode(self._outgoing(grad, before), None, 1.0, stream, out)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        self._pair.pull.validate(payload, self._numel)
        if residual is not None:
            before = np.float32(rescale) * residual
            p = self._outgoing(target, before)
            with np.errstate(all="ignore"):
                residual[:] = self._scheme.left_over(_CPU, p, before, self._decoded(self._pair.push, sent[0]))
        state = np.float32(rescale / self._unit) * self._state
        with np.errstate(all="ignore"):
            target[:], self._state = self._scheme.incoming(_CPU, self._decoded(self._pair.pull, payload), state)
        self._unit = 1.0 if residual is not None else rescale

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        residual[:] = self._scheme.put_back(_CPU, residual, self._decoded(self._pair.push, sent[0]))

    @property
    def saved(self) -> F32 | None:
        return self._state / np.float32(self._unit) if self._scheme.keeps_state else None

    def restore(self, saved: F32) -> None:
        self._state, self._unit = saved.copy(), 1.0

    def _outgoing(self, grad: F32, residual: F32) -> F32:
        with np.errstate(all="ignore"):
            p = self._scheme.outgoing(_CPU, grad, residual)
        if p.dtype != np.float32 or p.shape != (self._numel,):
            raise CodecError(f"codec {self._scheme.name}: outgoing gave {p.dtype}{list(p.shape)}, not float32[{self._numel}]")
        return np.ascontiguousarray(p)

    def _decoded(self, codec: Codec, payload: Bytes) -> F32:
        out = np.empty(self._numel, np.float32)
        for lo, hi in slices(codec, self._numel):
            codec.decode(payload, self._numel, lo, hi, out[lo:hi])
        return out
