"""What one exchange's gradients travel by: the choice, the layouts that are declared by it, and what codecs keep of the gradients.

Owns declarations, and switches from one choice to the next. Knows no gradients: when they are declared, and when a switch is due, is the exchange's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.layout.backup import NAME
from psgc.plan.model.plan import Plan
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients.rows import rows_bucket, rows_spec
from psgc.torch.plans.choice import Choice, plan_for
from psgc.torch.plans.fusing import buckets_by_codec
from psgc.torch.plans.planned import declared_buckets, is_of, leave_for_trace, of_model, write_layout
from psgc.torch.session.run_report import report_of
from psgc.torch.state.residuals import Residuals
from psgc.torch.tensors.declaring import declaration
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
FIRST: Final = ("optimizer0", "ddp0")  # whose layouts are written to files


def refuse_late(backup: int, what: str) -> None:
    if backup:
        raise UsageError(
            f"{what}: under {NAME}={backup} a gradient may come after its step, and would be lost with this layout; begin by what you switch to, or unset it"
        )


class Declared(NamedTuple):
    """A layout that every rank has declared. members: of its tensors the places among those that were to be declared. on_gpu: whether gradients on a GPU may be
    encoded there, where the layout leaves that open."""

    layout: Layout
    members: tuple[int, ...]
    on_gpu: bool


@dataclass(slots=True)
class _Declared:
    """What has been declared in one session. choices, layouts: how many so far; tensors: how many are in a layout now."""

    choices: int = 0
    layouts: int = 0
    tensors: int = 0


class Layouts:
    """See the module's text. choice: what gradients travel by; a plan must be of exactly these gradients. whole: all gradients are declared at once, as one
    layout. turn: as of a declaration, of the first layout: exchanges may declare side by side, and which servers their parts are on is not to depend on who is
    first. sparse: names of parameters whose gradients are sparse, and travel as rows, whatever the choice."""

    def __init__(
        self, session: Session, name: str, choice: Choice, whole: bool = False, turn: int = 0, sparse: frozenset[str] = frozenset()
    ) -> None:
        self.session, self.name, self.choice, self.sparse = session, name, choice, sparse
        self.mean = True
        self.backup = 0  # how many ranks' gradients a step need not wait for
        self.residuals = Residuals(session)
        self._whole, self._turn = whole, turn
        self._so_far = _Declared()
        self._next: Choice | None = None  # from the next step on
        self._default: Declaration | None = None  # the last one, but for what residuals ask for

    @property
    def declared(self) -> int:
        """How many tensors are in a layout now."""
        return self._so_far.tensors

    @property
    def count(self) -> int:
        """How many layouts have been declared in this session."""
        return self._so_far.layouts

    def rejoin(self, session: Session) -> None:
        """Go on in another session, where nothing is declared yet."""
        self.session, self.residuals, self._so_far = session, Residuals(session), _Declared()

    def give_up(self) -> None:
        """All gradients are to be declared anew."""
        self._so_far.tensors = 0

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Raises UsageError where a step may be closed without a rank: it is late then."""
        refuse_late(self.backup, "switch_plan()")
        self._next = choice

    def redeclare(self) -> None:
        """In the next step, gradients are declared anew, by the choice that is due then."""
        self.switch(self._next or self.choice)

    def take_next(self, put_back: bool) -> bool:
        """A step begins. If another choice is due, collect what codecs have kept by the present one. Returns whether layouts are to be given up.
        put_back: the last step's result was."""
        if self._next is None:
            return False
        self.choice, self._next = self._next, None
        if not self.declared:
            return False
        self.residuals.replace(put_back)
        return True

    def declare(
        self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor], order: tuple[int, ...], used: Sequence[int],
        fused: tuple[BucketSpec, ...] = (), awaited_singly: bool = False,
    ) -> Iterator[Declared]:  # fmt: skip
        """Declare tensors that are in no layout yet, and wait until every rank has.

        parameters: whose gradients they are. order: in which they became ready. used: those that this rank has. fused: their buckets, where no plan says.
        awaited_singly: as a declaration's."""
        rows = [index for index, spec in enumerate(specs) if spec.name in self.sparse]
        if not rows:
            yield from self._declare_dense(specs, parameters, order, used, fused, awaited_singly)
        else:
            dense = [index for index in range(len(specs)) if index not in rows]
            if dense:
                places = {index: place for place, index in enumerate(dense)}
                of_dense = tuple(places[index] for index in order if index in places), tuple(places[i] for i in used if i in places)
                those = tuple(specs[index] for index in dense), [parameters[index] for index in dense]
                for declared in self._declare_dense(*those, *of_dense, fused, awaited_singly):
                    yield declared._replace(members=tuple(dense[place] for place in declared.members))
            yield from self._declare_rows(specs, rows)
        self._so_far.tensors += len(specs)

    def _declare_rows(self, specs: Sequence[TensorSpec], rows: Sequence[int]) -> Iterator[Declared]:
        """Declare the sparse ones among the specs, each as a bucket by itself, summed and not averaged: their buffers divide."""
        buckets = tuple(rows_bucket(place, specs[index]) for place, index in enumerate(rows))
        everything = tuple(range(len(rows)))
        default = replace(
            self._declaration(tuple(rows_spec(specs[index]) for index in rows), "none", everything, everything), buckets=buckets, mean=False
        )
        for wanted, members in self.residuals.declarations(default, self._next_name):
            layout = self.session.declare(wanted)
            report_of(self.session).laid_out(layout)
            self.residuals.add(layout, wanted)
            yield Declared(layout, tuple(rows[member] for member in members), False)

    def _declare_dense(
        self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor], order: tuple[int, ...], used: Sequence[int],
        fused: tuple[BucketSpec, ...], awaited_singly: bool,
    ) -> Iterator[Declared]:  # fmt: skip
        config, choice = self.session.config, self.choice
        plan = self._plan_of(specs)
        planned = () if plan is None else declared_buckets(plan, specs, self.session)
        buckets = planned or fused
        buckets = buckets or self._buckets_by_rule(specs, parameters)
        default = replace(self._declaration(specs, choice.codec, order, used), buckets=buckets, awaited_singly=awaited_singly)
        self._default = default
        on_gpu = config.gpu_codecs and not planned  # a plan itself says where
        for wanted, members in self._declarations(default):
            layout = self.session.declare(wanted)
            on_device = on_gpu and all(engine_of(parameters[i]) is not None for i in members)
            self._write(layout, on_device, plan)
            report_of(self.session).laid_out(layout)
            self.residuals.add(layout, wanted)
            yield Declared(layout, members, on_gpu)

    def _buckets_by_rule(self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor]) -> tuple[BucketSpec, ...]:
        if self.choice.rule is None:
            return ()
        codecs = [self.choice.codec_of(spec.name, parameter) for spec, parameter in zip(specs, parameters, strict=True)]
        return buckets_by_codec(specs, codecs, self.session.config.fuse_bytes)

    def check(self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor]) -> None:
        """Raise CodecError, naming the tensor, where the choice, which is no plan, could not carry these in this job."""
        config, everything = self.session.config, tuple(range(len(specs)))
        wanted = replace(
            self._declaration(specs, self.choice.codec, everything, everything), buckets=self._buckets_by_rule(specs, parameters)
        )
        build_layout(wanted, layout_id=0, servers=1 if config.solo else config.servers, workers=self.session.size)

    def _declarations(self, default: Declaration) -> Iterator[tuple[Declaration, tuple[int, ...]]]:
        if self._whole:
            yield self.residuals.declaration(replace(default, name=self._next_name())), tuple(range(len(default.tensors)))
        else:
            yield from self.residuals.declarations(default, self._next_name)

    def _next_name(self) -> str:
        self._so_far.layouts += 1
        return self.name if self._so_far.layouts == 1 else f"{self.name}.{self._so_far.layouts}"

    def proposed(self, specs: tuple[TensorSpec, ...], codec: str, order: tuple[int, ...]) -> Declaration:
        """What would be declared of all gradients by this codec."""
        if self._whole and self._default is not None:
            return replace(self._default, name=self.name, codec=codec, buckets=())
        return self._declaration(specs, codec, order, order)

    def _declaration(self, specs: tuple[TensorSpec, ...], codec: str, order: tuple[int, ...], used: Sequence[int]) -> Declaration:
        turn = self._turn + self._so_far.layouts
        return declaration(
            self.session,
            self.name,
            "plan",
            specs,
            codec,
            mean=self.mean,
            order=order,
            used=tuple(sorted(used)),
            turn=turn,
            backup=self.backup,
        )

    def _plan_of(self, specs: tuple[TensorSpec, ...]) -> Plan | None:
        """The choice's plan, of these tensors."""
        choice = self.choice
        if self.declared and (choice.plan is not None or choice.awaited):
            if choice.auto:
                return None  # uncompressed, until ``auto`` plans for all of them
            raise UsageError(
                f"parameter {specs[0].name!r} was added after the first step, but the job runs a plan, which is of the parameters "
                f"of the first step; add it before, or run without a plan"
            )
        if not self.declared:
            self._so_far.choices += 1
        plan = plan_for(self.session, choice, f"plan {self._so_far.choices} of {self.name}")
        if plan is None or (choice.auto and not is_of(plan, specs)):  # parameters were added since ``auto`` made it
            return None
        return of_model(plan, specs, self.session)

    def _write(self, layout: Layout, on_gpu: bool, plan: Plan | None) -> None:
        """Write the first exchange's layout as a plan where files are asked for, and again after a switch; a plan covers parameters that exist from the first
        step."""
        path, first = self.session.config.layout_out, layout.name in FIRST or (self.name in FIRST and self._so_far.choices > 1)
        if path and self.session.whole.rank == 0:
            if first:
                write_layout(path, layout, self.session, on_gpu)
            elif not self._whole:
                logger.warning("PSGC_LAYOUT_OUT has the layout of %s; that of %s is not written", FIRST[0], layout.name)
        if first:
            leave_for_trace(self.session, plan, layout, on_gpu)
