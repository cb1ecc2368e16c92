"""The gradients of one model that FSDP2 has sharded within a node.

A unit's slice of gradients is a tensor by itself, which the ranks that hold the same shard average: a bucket of these ranks alone. It leaves when FSDP has
summed it within the node, and the mean is written where it lies, which FSDP has made p.grad of by then; where FSDP goes on to compute with it at once, its hook
waits for the mean. A step is over when backward is; where FSDP reduces behind all backwards (torch's pipelining), when it is done with that.

Which parameters are trained may change between two steps, on all ranks alike. A unit that is frozen whole keeps its bucket, and skips. Where others of a unit's
parameters are trained than were declared, all units are declared anew, and what codecs keep of each tensor goes along.

Owns the mapping from units to buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.layout import Bucket, BucketSpec, TensorSpec
from psgc.program.order import is_issued
from psgc.torch.ddp.told import add_model
from psgc.torch.fsdp.planned import Way
from psgc.torch.fsdp.reshard import Parameter, needed, resharded
from psgc.torch.fsdp.units import ShardedParameters, Slice, Unit, in_backward
from psgc.torch.gradients.backward_end import BackwardEnd, await_end
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.gradients.last_step import StepFlags
from psgc.torch.gradients.layouts import Declared
from psgc.torch.gradients.skips import Skips
from psgc.torch.gradients.written import Written
from psgc.torch.plans.choice import Choice
from psgc.torch.plans.fusing import nbytes_of
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state import saved
from psgc.torch.tensors.buffers import Array, TensorsBuffer, dtype_name, staging_dtype, where_of
from psgc.torch.tensors.sent import FilledBucket
from psgc.worker.session import Session

Replicas = tuple[tuple[int, ...], ...]


class ShardBucket(FilledBucket):
    """A unit's slice: several tensors to its codec, and one flat one, which FSDP has reduced, to its memory."""

    __slots__ = ()

    def bind(self) -> None:
        self.buffer.bind([self.tensors[0]])

    def lie_in(self, memory: Array | None) -> None:
        """Do nothing: what FSDP has reduced is the bucket itself."""


def _flat_buffer(bucket: Bucket, on_gpu: bool) -> TensorsBuffer:
    return TensorsBuffer([(bucket.numel,)], staging_dtype(bucket.codec, bucket.dtype), where_of(bucket, on_gpu))


class FsdpGradients(FrontEnd[FilledBucket]):
    """See the module's text. units: in the model's order. replicas: by shard, the ranks that hold it. choice: a codec, or a rule for each unit by its name.
    ways: what a plan says of each unit by its name; none where none does."""

    def __init__(
        self,
        session: Session,
        number: int,
        choice: Choice,
        units: Sequence[Unit],
        replicas: Replicas,
        ways: Mapping[str, Way] = MappingProxyType({}),
    ) -> None:
        super().__init__(GradientExchange(session, f"fsdp{number}", choice, whole=True, turn=number))
        self.steps = 0
        self._units, self._replicas, self._ways = units, replicas, dict(ways)
        self._slices: list[Slice | None] = [None] * len(units)  # that are declared, or will be
        self._frozen: list[int] = []  # units that are declared, and were frozen whole when the step began
        self._absent: list[int] = []  # units that this rank skips in the step under way
        self.parameters = ShardedParameters(units)
        self._shard = next(shard for shard, ranks in enumerate(replicas) if session.rank in ranks)
        self._end: BackwardEnd | None = None  # of the backward under way, or of what FSDP reduces behind all
        self._forwards = False  # whether units come in the model's order, as behind all backwards, and not in backward's
        self._taking = threading.Lock()
        self.exchange.written = Written(self.parameters.present)
        add_model(self)

    def check_leaving(self) -> None:
        """Raise UsageError: torch.distributed's process group has one size."""
        raise UsageError("suspend(): a model that FSDP has sharded cannot go on in a job of another size")

    def knows(self, parameter: torch.Tensor) -> bool:
        return self.parameters.knows(parameter)

    @property
    def keeps_mean(self) -> bool:
        return self.parameters.hold_gradients

    @uncompiled
    def take(self, unit: int, gradients: torch.Tensor) -> None:
        """FSDP has summed this unit's gradients within the node. In autograd's thread, or where FSDP was told to reduce. Returns once the mean is on its
        way, or there, if FSDP goes on to compute with it. Raises UsageError for gradients that psgc cannot average."""
        exchange, its = self.exchange, self._units[unit]
        with self._taking:
            if self._end is not None and self._end.lost:
                raise UsageError(
                    "fsdp_hook: the last backward raised after some gradients had left; FSDP cannot go on after that: start the job again"
                )
            begins = not exchange.last.begun
            if begins:
                self._look()
            its.check(gradients, None if unit in self._frozen else self._slices[unit], summed=not exchange.mean)
            if begins:
                self._begin()
            if self._end is None:
                self._end = await_end(self, _finish) if in_backward() else its.await_end(self.finish)
            if not exchange.declared:
                self._declare()
            if begins:  # before any hook waits: without servers, what is declared before it must leave before it
                self._skip(self._frozen)
            bucket = self._bucket(unit)
            if unit in self._absent:
                raise UsageError(
                    f"fsdp_hook: the gradients of {its.name!r} come after those of a module that is registered before it, for whose mean FSDP waits; "
                    f"where ranks exchange among themselves such modules come in the reverse order of their registration: change it, or give the job "
                    f"servers"
                )
            if bucket.ticket is not None:
                raise UsageError(
                    f"fsdp_hook: FSDP reduced the gradients of {its.name!r} twice in one backward; run the model once in each, or under no_sync"
                )
            waits = its.waits(gradients)
            if waits:
                self._skip(self._held_back_by(unit))
            exchange.observer.ready(f"{its.name}@{self._shard}", gradients)
            bucket.put(0, gradients)
            exchange.submit(bucket)
        if waits:
            exchange.wait([bucket])
            bucket.arrive()

    def finish(self) -> None:
        """The step is over: skip the units that it did not reach, and wait for all means."""
        exchange, self._end = self.exchange, None
        self._skip([unit for unit, its in enumerate(self._slices) if its is not None and self._bucket(unit).ticket is None])
        exchange.observer.leaving()
        exchange.wait()
        for unit in self._absent:
            if not self._bucket(unit).buffer.skipped:
                raise UsageError(
                    f"fsdp_hook: this rank's backward had no gradients of {self._units[unit].name!r}, and another replica's had; every replica must use "
                    f"the same modules in a step"
                )
        for bucket in exchange.buckets:
            bucket.arrive()
            bucket.take()
        exchange.observer.delivered()
        self.steps += 1
        exchange.deliver()

    def _held_back_by(self, unit: int) -> list[int]:
        """Units whose transfers among ranks come before this one's, and that have not left. The step has passed them by."""
        if not self._among_ranks(unit):
            return []
        before = range(unit) if self._forwards else range(len(self._units) - 1, unit, -1)
        return [each for each in before if self._slices[each] is not None and self._bucket(each).ticket is None and self._among_ranks(each)]

    def _among_ranks(self, unit: int) -> bool:
        return any(map(is_issued, self._bucket(unit).bucket.option))

    def _skip(self, units: Sequence[int]) -> None:
        """Take part in what the other replicas may have of these."""
        for unit in units:
            bucket, its = self._bucket(unit), self._slices[unit]
            assert its is not None
            bucket.put(0, self._units[unit].of(its)[0].new_zeros(its.numel), takes_part=False)
            self.exchange.submit(bucket)
        self._absent += units

    def state(self) -> dict[str, Any]:
        return {**super().state(), "mesh": [list(ranks) for ranks in self._replicas]}

    def needed_of(self, mesh: Replicas) -> tuple[set[int], set[int]] | None:
        """The ranks of a job with this mesh of which ``go_on`` reads what they kept, and those of which it reads what servers kept; None: this rank's alone."""
        return None if mesh == self._replicas else needed(mesh, self._replicas, self.session.rank)

    def go_on(self, states: saved.State | Sequence[saved.State]) -> None:
        """As of every front end; also from the states of all ranks of a job with another mesh."""
        given = [states] if isinstance(states, Mapping) else list(states)
        mesh = [list(ranks) for ranks in self._replicas]
        before = next((state["mesh"] for state in given if isinstance(state, Mapping) and "mesh" in state), mesh)
        if before == mesh:
            super().go_on(states)
            return
        if len(given) != sum(map(len, before)):
            raise UsageError(
                f"load_residual_state_dict: the state is of {len(before)} shards on {len(before[0])} nodes, and the model of {len(mesh)} on "
                f"{len(mesh[0])}; pass a list of all ranks' states"
            )
        checked = saved.check_states(given, self.session.rank, self.session.size, self.session.part)
        saved.check_kind(checked, saved.GRADIENTS)
        # of a mesh's dimension all ranks have the same piece, which is all that there is of a parameter
        part = self.session.whole is not self.session
        pieces = [{n: Parameter(piece, piece) for n, piece in unit.pieces} if part else unit.whole for unit in self._units]
        kept = resharded(checked, saved.GRADIENTS, before, mesh, self.session.rank, {n: each for of in pieces for n, each in of.items()})
        self.exchange.last.go_on(StepFlags(False, *saved.units_of(checked[0])), Skips.of(saved.skips_of(checked[0])))
        self.exchange.restore(kept)

    def _look(self) -> None:
        """Before a step: see which parameters are trained now, and in which order they come, and have all declared anew where that is not what was
        declared."""
        exchange, before = self.exchange, (self._slices, self._forwards)
        self._forwards = not in_backward()
        self.settle()  # before it is seen what is trained now: the last result is of what was trained then
        self.parameters.look()
        if not exchange.declared:
            exchange.mean = not next((unit for unit in self._units if unit.pieces), self._units[0]).summed
        now = [unit.slice() for unit in self._units]
        self._slices = [had if its is None or its == had else its for its, had in zip(now, self._slices, strict=True)]
        self._frozen = [unit for unit, its in enumerate(now) if its is None and self._slices[unit] is not None]
        if exchange.declared and (self._slices, self._forwards) != before:
            exchange.redeclare()

    def _begin(self) -> None:
        """The first gradients of a step have come."""
        self._absent = []
        self.session.check()
        self.exchange.begin()

    def _declare(self) -> None:
        """Declare the gradients of all units and shards, and wait until every rank has."""
        exchange, shards = self.exchange, len(self._replicas)
        specs, parameters, buckets = list[TensorSpec](), list[torch.Tensor](), list[BucketSpec]()
        for place, (unit, its) in enumerate(zip(self._units, self._slices, strict=True)):
            if its is None:
                continue
            dtype = dtype_name(torch.empty(0, dtype=its.dtype), f"gradients of {unit.name!r} that FSDP has reduced")
            for shard in range(shards):
                first = len(specs)
                specs += [TensorSpec(f"{name}@{shard}", shape, dtype) for name, shape in its.pieces]
                parameters += unit.of(its)
                tensors = tuple(range(first, len(specs)))
                way = self._way(unit, parameters[first], sum(map(nbytes_of, specs[first:])))
                after = place if self._forwards else len(self._units) - 1 - place  # how many units' gradients come first
                priority = shard - (after + 1) * shards + 1
                buckets.append(
                    BucketSpec(tensors, way.codec, priority, option=way.option, device=way.device, members=self._replicas[shard])
                )
        exchange.specs = tuple(specs)
        order = tuple(range(len(specs)))
        exchange.declare(self._own, exchange.specs, parameters, order, order, tuple(buckets))

    def _way(self, unit: Unit, parameter: torch.Tensor, nbytes: int) -> Way:
        """How the unit's shards travel. parameter: one of the unit's. Raises UsageError for a unit that was frozen whole when a plan was taken."""
        if unit.name in self._ways:
            return self._ways[unit.name]
        if self._ways and not unit.pieces:
            return Way("none")  # it was trained once, and skips
        if self._ways:
            raise UsageError(
                f"fsdp_hook: {unit.name!r} is trained now, and was frozen when the job's plan was taken, which does not say how it travels; call "
                f"switch_plan() with a plan of what is trained now"
            )
        return Way(self.exchange.choice.codec_of(unit.name, parameter) if nbytes >= self.session.config.min_compress_bytes else "none")

    def switch_to(self, choice: Choice, ways: Mapping[str, Way]) -> None:
        """As ``switch``, also to a plan's ``ways``."""
        self.switch(choice)
        self._ways = dict(ways)

    def _own(self, declared: Declared) -> list[FilledBucket]:
        """This rank's buckets, in the units' order."""
        layout = declared.layout
        own = sorted((one for one in layout.buckets if one.is_of(self.session.rank)), key=lambda one: one.tensors)
        return [ShardBucket(layout, one, _flat_buffer(one, declared.on_gpu)) for one in own]

    def _bucket(self, unit: int) -> FilledBucket:
        """Of one that has a slice."""
        return self.exchange.buckets[sum(its is not None for its in self._slices[:unit])]


def _finish(models: list[FsdpGradients]) -> None:
    for model in dict.fromkeys(models):
        model.finish()
