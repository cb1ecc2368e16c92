"""Tensors that servers hold: every rank pushes changes, servers apply them by a named rule, and the values come back at once.

Owns their declaration, and the flat arrays that changes leave from and values arrive in. What the changes are is the caller's business: those of an
asynchronous optimizer are what a local step has changed (``gradients/changes.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import parse_scheme
from psgc.codecs.scheme import PairScheme
from psgc.errors import CodecError, UsageError
from psgc.layout.update_rule import UpdateRule
from psgc.torch.session import api
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.codec_text import given_text
from psgc.torch.tensors.declaring import declaration, spec_of
from psgc.torch.tensors.held_alone import HeldAlone
from psgc.torch.tensors.sent import SentBucket
from psgc.torch.tensors.shards import local
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import Session

PULLED: Final = "none"  # values travel back uncompressed
WEIGHTS: Final = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}  # what parameters are held as
_made: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()


def one_way(codec: str) -> str:
    """The codec of a declaration whose changes are pushed by ``codec``, and whose values are pulled uncompressed. Raises CodecError for one that is unknown, or
    not of that kind."""
    push, _, pull = codec.partition("/")
    if type(parse_scheme(codec)) is not PairScheme or pull not in ("", PULLED):
        raise CodecError(
            f"codec {codec}: changes are pushed by a codec of one round and without momentum, and values come back uncompressed; choose one such as "
            f"'int8' or 'topk:k=0.01'"
        )
    return push if push == PULLED else f"{push}/{PULLED}"


def held_dtype(parameter: torch.Tensor, name: str, by: str = "asynchronous training") -> torch.dtype:
    """What servers hold a parameter as. by: who has them do so, for errors. Raises UsageError for dtypes that are no floats."""
    spec_of(local(parameter), name, f"parameter {name!r}")  # refuses what no layout has
    dtype = WEIGHTS.get(parameter.dtype)
    if dtype is None:
        raise UsageError(f"parameter {name!r} is {parameter.dtype}: {by} holds float parameters only")
    return dtype


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is held, as a parameter of this dtype has it; itself if that is its own. A parameter has come as far as it is from there: what rounding took is no
    change of it."""
    return value if value.dtype == dtype else value.to(dtype).to(value.dtype)


@dataclass(slots=True)
class _Flat:
    """A bucket's elements, which stay where they are."""

    array: NDArray[Any]
    waits = False

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        """The array is where the values are to be."""


@dataclass(slots=True, eq=False)
class HeldBucket(SentBucket):
    """pulls: the step only asks for the values."""

    pulls: bool = False

    @property
    def skip(self) -> bool:
        return self.pulls


def _check_change(change: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Raise UsageError for what is no change of a tensor with this value."""
    wanted = (
        f"HeldTensors: the change of {name!r}: expected a tensor of shape {list(value.shape)}, {_text(value.dtype)} or what becomes that"
    )
    if not isinstance(change, torch.Tensor):
        raise UsageError(f"{wanted}; got a {type(change).__name__}")
    if change.shape != value.shape:
        raise UsageError(f"{wanted}; got one of shape {list(change.shape)}")
    if not torch.can_cast(change.dtype, value.dtype):
        raise UsageError(f"{wanted}; got {_text(change.dtype)}; convert it")
    if change.layout != torch.strided:
        raise UsageError(f"{wanted}; got one that is {_text(change.layout)}; convert it with to_dense()")


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


class HeldTensors(api.Member):
    """Tensors that servers hold under ``name``, and update by ``rule`` whenever a rank pushes a change.

        counts = psgc.HeldTensors({"words": torch.zeros(1000, dtype=torch.int64)}, "counts")
        counts.push_pull({"words": seen})          # adds what this rank has seen
        counts.values["words"]                     # as the servers had them just then

    tensors: the initial values by name; rank 0's count. float32, float64 or integers, of any device; they are not changed.
    rule: ``add`` applies each change at once; ``average`` and ``nesterov:lr=0.7,momentum=0.9`` wait until every rank that is still in the job
        has pushed one, and apply their mean, the latter as an outer step of SGD; ``delayed:learners=4`` takes such steps of changes that come when they like
        (``psgc/layout/update_rule.py``); ``add:staleness=3`` lets no rank be more than 3 pushes ahead of the slowest.
    compression: codec text for the changes, with error feedback where the codec has it; values come back uncompressed.
    memory: what this rank's codecs have kept of these tensors' changes in an earlier job (``remembered``), and steps and random streams, alike on all ranks.
    Every rank makes it, with the same names, shapes, rule and codec; it returns once all have, and rank 0's values are there: ``values`` has them.
    Raises UsageError for a name that was used before, a dtype or a rule that cannot be, or a job without servers; CodecError.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], name: str, rule: str = "add", compression: Any = None, *, memory: LayoutMemory | None = None
    ) -> None:  # fmt: skip
        self._session = session = api.current_session()
        refuse_replaceable(session, "HeldTensors")
        config = session.config
        self.rule = UpdateRule.parse(rule)
        if config.wire == "pslite":
            raise UsageError("HeldTensors: servers of BytePS's wire hold no tensors; leave PSGC_WIRE=pslite out")
        specs = tuple(spec_of(tensor, key, f"tensor {key!r}") for key, tensor in tensors.items())
        names = _made.setdefault(session, set())
        if name in names:
            raise UsageError(f"HeldTensors: the name {name!r} was used before in this job; choose another")
        for key, tensor in tensors.items():
            if tensor.is_complex():
                raise UsageError(f"HeldTensors: tensor {key!r} is complex; give torch.view_as_real() of it")
        for spec in specs:
            self.rule.check_dtype(spec.dtype)
        before = LayoutMemory() if memory is None else memory
        layout = session.declare(declaration(
            session, f"weights.{name}", "weights", specs, one_way(given_text(compression)), mean=False, rule=self.rule.canonical,
            past_steps=before.steps, seed=before.seed, stream=before.stream,
        ))  # fmt: skip
        names.add(name)
        self._layout, self._asked = layout, 0
        self.values = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}
        self.buckets: list[HeldBucket] = []
        self._alone = HeldAlone(self.rule, memory) if config.solo else None
        if self._alone is None:
            for bucket in layout.buckets:
                array = np.zeros(bucket.numel, np.dtype(bucket.dtype))
                flat = torch.from_numpy(array)
                for key, place in layout.places(bucket):
                    self.values[key] = flat[place].view(self.values[key].shape)
                self.buckets.append(HeldBucket(layout, bucket, _Flat(array)))
            if memory is not None:
                session.remember(layout, memory)
            api.add_member(self)
        with torch.no_grad():
            for key, tensor in tensors.items():
                self.values[key].copy_(tensor)
        self._leave(pull=session.rank > 0)
        self.take()

    @property
    def session(self) -> Session:
        return self._session

    @uncompiled
    def push_pull(self, changes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Push a change of each tensor (of those that are left out, zeros), and wait for the values with it. Returns ``values``. changes: by name, of the
        tensors' shapes, and of dtypes that become theirs without losing a fraction or an imaginary part; of any device. Raises UsageError for others, and
        then pushes nothing."""
        self.push(changes)
        return self.take()

    @uncompiled
    def push(self, changes: Mapping[str, torch.Tensor]) -> None:
        """As ``push_pull``, but without the wait: until ``take`` has returned, ``values`` is psgc's to write to."""
        unknown = [key for key in changes if key not in self.values]
        if unknown:
            raise UsageError(f"HeldTensors: no tensor is named {unknown[0]!r}; there are {', '.join(self.values)}")
        for key, change in changes.items():
            _check_change(change, self.values[key], key)
        self._psgc_push(changes)

    @torch.no_grad()
    def _psgc_push(self, changes: Mapping[str, torch.Tensor]) -> None:
        """``push`` of what is known to fit."""
        for key, value in self.values.items():
            change = value if self._alone is None else torch.empty_like(value)
            if key in changes:
                change.copy_(changes[key])
            else:
                change.zero_()
            if self._alone is not None:
                self._alone.apply(key, value, change)
        self._leave(pull=False)

    @uncompiled
    def take(self) -> dict[str, torch.Tensor]:
        """Wait for the values that answer the last ``push``. Returns ``values``. Raises JobFailed."""
        self._session.wait([bucket.ticket for bucket in self.buckets if bucket.ticket is not None])
        return self.values

    def pull(self) -> dict[str, torch.Tensor]:
        """Wait for the values as they are now. Counts neither as a push nor in a round."""
        self._leave(pull=True)
        return self.take()

    def remembered(self) -> LayoutMemory:
        """What this rank's codecs keep of the changes, between two pushes, and the momentum that servers keep of ``nesterov`` in rounds, of the tensors
        that this rank answers for."""
        layout = self._layout
        if self._alone is not None:
            memory = self._alone.remembered(layout.past_steps + self._asked)
        else:
            memory = self._session.remembered(layout, dropped=False)
        return replace(memory, seed=layout.seed, stream=layout.stream)

    def _leave(self, pull: bool) -> None:
        """Push what ``values`` holds, which must be changes now, or only ask for the values."""
        self._asked += 1
        for bucket in self.buckets:
            bucket.pulls = pull
            bucket.send(self._session)

    def check_leaving(self) -> None:
        """Raise UsageError: servers' values end with their job."""
        raise UsageError("suspend(): servers hold this job's weights, and end with it; save the model, and start a new job from it")
