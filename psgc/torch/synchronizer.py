"""From ready gradients to buckets under way: counts what backward has made, submits what is complete, says what was skipped.

One for each DistributedOptimizer. The hook runs in autograd's thread and only counts and enqueues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from psgc.errors import UsageError
from psgc.layout import Bucket, Declaration, Layout
from psgc.torch.amp import loss_scale
from psgc.torch.buffers import GradientBucket, spec_of
from psgc.worker.session import Session, Ticket

_instances = itertools.count()


@dataclass(slots=True)
class _Entry:
    """One parameter. count: backward passes since the last synchronize; bucket: None until it is laid out."""

    parameter: torch.nn.Parameter
    name: str
    group: int
    count: int = 0
    bucket: _BucketState | None = None


@dataclass(slots=True, eq=False)
class _BucketState:
    layout: Layout
    bucket: Bucket
    entries: list[_Entry]
    buffer: GradientBucket
    group: int
    ready: int = 0
    ticket: Ticket | None = None


@dataclass(slots=True)
class Synchronizer:
    """``parameters``: (name, parameter, group) in the optimizer's order. groups: the optimizer's, for their learning rates."""

    session: Session
    codec: str
    passes: int
    groups: list[dict[str, object]]
    entries: dict[torch.nn.Parameter, _Entry] = field(default_factory=dict)
    buckets: list[_BucketState] = field(default_factory=list)
    synced: bool = False
    skip_next: bool = False  # inside skip_synchronize()
    _name: str = ""
    _layouts: int = 0
    _order: list[_Entry] = field(default_factory=list)  # not yet laid out, as their gradients became ready
    _in_round: bool = False
    _unapplied: bool = False  # the last round's result was never applied by step()
    _previous_skipped: bool = False
    _scale: float = 1.0
    _rates: dict[int, float] = field(default_factory=dict)
    _rescale: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name = f"gradients.{next(_instances)}"

    def watch(self, parameters: Iterable[tuple[str, torch.nn.Parameter, int]]) -> None:
        """Hook parameters that require a gradient and are not hooked yet."""
        for name, parameter, group in parameters:
            if parameter.requires_grad and parameter not in self.entries:
                self.entries[parameter] = _Entry(parameter, name, group)
                parameter.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Submit what is not under way yet, wait for everything, and leave every p.grad holding the aggregate. Twice: no effect."""
        if self.synced:
            return
        self._lay_out_new()
        self._begin_round()
        for state in self.buckets:
            if state.ticket is None:
                self._submit(state, skip=all(entry.count == 0 for entry in state.entries))
        self.session.wait([state.ticket for state in self.buckets if state.ticket is not None])
        for state in self.buckets:
            state.ready, state.ticket = 0, None
        for entry in self.entries.values():
            entry.count = 0
        self.synced, self._in_round, self._unapplied = True, False, True

    def applied(self) -> None:
        """step() has used the aggregate."""
        self.synced, self._unapplied = False, False

    @property
    def under_way(self) -> bool:
        """Whether gradients have been made that no synchronize has taken."""
        return not self.synced and any(entry.count for entry in self.entries.values())

    def _hook(self, parameter: torch.Tensor) -> None:
        entry = self.entries[parameter]  # type: ignore[index]
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(f"gradient of {entry.name!r} is sparse; psgc carries dense gradients: make the layer with sparse=False")
        entry.count += 1
        self.synced = False
        if entry.count > self.passes:
            raise UsageError(
                f"the gradient of {entry.name!r} was made {entry.count} times before step(), but backward_passes_per_step={self.passes}; "
                f"raise backward_passes_per_step, or call step() (or synchronize()) in between"
            )
        if entry.bucket is None:
            if entry.count == 1:
                self._order.append(entry)
        elif entry.count == self.passes:
            entry.bucket.ready += 1
            if entry.bucket.ready == len(entry.bucket.entries):
                self._begin_round()
                self._submit(entry.bucket, skip=False)

    def _begin_round(self) -> None:
        """The first submission of a step: what happened to the last step, and how the residuals' unit has changed."""
        if self._in_round:
            return
        self._in_round = True
        self._previous_skipped = self._unapplied
        scale = loss_scale()
        for number, group in enumerate(self.groups):
            rate = float(group.get("lr", 1.0))  # type: ignore[arg-type]
            last = self._rates.get(number, rate)
            self._rescale[number] = scale / self._scale * (last / rate if rate and last else 1.0)
            self._rates[number] = rate
        self._scale = scale

    def _submit(self, state: _BucketState, skip: bool) -> None:
        state.buffer.used = [entry.count > 0 for entry in state.entries]
        state.ticket = self.session.submit(
            state.layout,
            state.bucket.index,
            state.buffer,
            skip=skip,
            previous_skipped=self._previous_skipped,
            rescale=self._rescale[state.group],
        )

    def _lay_out_new(self) -> None:
        """Agree with the other ranks on buckets for parameters that have none yet: at the first synchronize, in ready order."""
        new = [entry for entry in self.entries.values() if entry.bucket is None]
        if not new:
            return
        config = self.session.config
        place = {id(entry): i for i, entry in enumerate(new)}
        self._layouts += 1
        declaration = Declaration(
            self._name if self._layouts == 1 else f"{self._name}.{self._layouts}",
            "plan",
            tuple(spec_of(entry.name, entry.parameter, entry.group) for entry in new),
            self.codec,
            mean=True,
            order=tuple(place[id(entry)] for entry in self._order),
            used=tuple(place[id(entry)] for entry in new if entry.count),
            part_bytes=config.part_bytes,
            fuse_bytes=config.fuse_bytes,
            min_compress_bytes=config.min_compress_bytes,
        )
        self._order.clear()
        layout = self.session.declare(declaration)
        for bucket in layout.buckets:
            entries = [new[i] for i in bucket.tensors]
            buffer = GradientBucket([entry.parameter for entry in entries], bucket.codec, bucket.dtype)
            state = _BucketState(layout, bucket, entries, buffer, entries[0].group)
            for entry in entries:
                entry.bucket = state
            self.buckets.append(state)
