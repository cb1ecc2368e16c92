"""``DiLoCo``: ranks train by themselves, and agree once in many steps, by an outer optimizer's step on the mean of how far they have come.

    LocalSGD          every rank goes on from the mean of all (Stich 2019): outer="average"
    DiLoCo            the mean is the outer optimizer's gradient (Douillard et al. 2023, arXiv 2311.08105): outer="nesterov"
    Streaming DiLoCo  fragments in turn, which travel while training goes on (Douillard et al. 2025, arXiv 2501.18512): fragments, delay, mix

Owns the schedule, counted by the inner optimizer's steps; ``fragment.py`` has the exchange with the outer step on every rank, ``held_fragment.py`` that with
the outer step on servers. What travels may be compressed by any codec that gradients may; to servers that hold the outer parameters, by those of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch

from psgc.errors import CodecError, UsageError
from psgc.layout.update_rule import UpdateRule
from psgc.torch.ddp import amp
from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.optimizers.demo import refuse_exchanging
from psgc.torch.plans.choice import Choice, Given, chosen
from psgc.torch.rarely.averaged import Averaged
from psgc.torch.rarely.counting import Steps, count, counted, forget, refuse_another
from psgc.torch.rarely.fragment import Fragment, Frozen, Outer, on_host, parts_of, together
from psgc.torch.rarely.held_fragment import HeldFragment
from psgc.torch.rarely.rendezvous import Rendezvous
from psgc.torch.rarely.schedule import Schedule
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.run_report import report_of
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state import saved
from psgc.torch.tensors.broadcast import broadcast_parameters, first_values
from psgc.torch.tensors.declaring import plain_name
from psgc.torch.tensors.held import held_dtype, one_way
from psgc.torch.tensors.sent import FilledBucket
from psgc.torch.tensors.shards import check_replicated, local, refuse_averaged, refuse_pieces, reshard, sharding_modules
from psgc.worker.session import Session

LEFT: Final = "ranks end with different parameters: what each has done since the last exchange is its own"


class DiLoCo:
    """Train ``model`` by ``inner`` on every rank by itself, and exchange once in ``every`` steps. A context manager, or used like the inner optimizer.

        with psgc.DiLoCo(model, inner, every=100, codec="int4"):
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()
                inner.step()

    Every rank makes it, with the same model and numbers; rank 0's parameters and buffers are then everyone's. Every rank must come to as many exchanges; a
    step that a GradScaler skips counts. Leaving the block without an error gives all ranks the mean of their parameters, where they differ; without a block,
    ``finish()`` does. Outer parameters and optimizer stay as they are for that. Another block of the same object goes on. Another DiLoCo of the same inner
    optimizer takes its place after that; a model of two optimizers has one DiLoCo, of the one whose steps count. Which parameters are trained, and which are
    frozen, does not change; the inner optimizer has none but the model's.
    Where each rank holds pieces of parameters (FSDP2), ``init(mesh=..., dim=...)`` first says which ranks hold the same ones, and exchange.

    outer:     "nesterov:lr=0.7,momentum=0.9" (DiLoCo's), "average" (LocalSGD), or a function that makes an optimizer of the outer parameters. Its state is
               on every rank, and the same there.
    fragments: a number, or a list of modules: parts of the model that are exchanged in turn, each once in ``every`` steps. Parameters of no module in the list
               are a fragment of their own.
    delay:     steps that a fragment travels while training goes on, before its mean is taken.
    mix:       what of its own parameters, with the steps taken since, a rank keeps when it takes the outer ones: from 0 (nothing) to below 1.
    codec:     codec text for what is exchanged, both ways, with error feedback where the codec has it; None: PSGC_CODEC, else uncompressed.
    on:        "workers": every rank has the outer parameters and takes their step. "servers": servers have them and take it, which spares each rank the
               momentum and a buffer; the parameters come back uncompressed, so that codec is of what is pushed.
    Raises UsageError for numbers that do not fit, CodecError.
    """

    _psgc_since: int  # of ``count``
    _psgc_last: int

    def __init__(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, *, every: int, outer: str | Outer = "nesterov:lr=0.7,momentum=0.9",
        fragments: int | Sequence[torch.nn.Module] = 1, delay: int = 0, mix: float = 0.0, codec: Given = None,
        on: Literal["workers", "servers"] = "workers",
    ) -> None:  # fmt: skip
        parts, self._frozen = parts_of(model, fragments, "DiLoCo"), Frozen(model, inner, "DiLoCo")
        self._trained = [parameter for part in parts for parameter in part.values()]
        self._psgc_moves = frozenset(map(id, self._trained))
        refuse_another(inner, "DiLoCo")
        refuse_exchanging(inner, "DiLoCo")
        for name, parameter in (each for part in parts for each in part.items()):
            held_dtype(parameter, name, "DiLoCo")
        self._schedule, self._mix = Schedule(every, len(parts), delay), mix
        if not 0 <= mix < 1:
            raise UsageError(f"DiLoCo: mix={mix!r}: expected the share of its own parameters that a rank keeps, from 0 to below 1")
        if on not in ("workers", "servers"):
            raise UsageError(f"DiLoCo: on={on!r}: expected workers or servers, whoever is to take the outer step")
        rule = _rule(outer)
        if on == "servers" and rule is None:
            raise UsageError(
                'DiLoCo: servers take average and nesterov as outer step; give a function that makes an optimizer with on="workers"'
            )
        api.init()
        session = self._psgc_session = api.current_session()
        refuse_replaceable(session, "DiLoCo")
        refuse_backup(session, "DiLoCo")
        self._averaged = Averaged({key: parameter for part in parts for key, parameter in part.items()}, session, "DiLoCo")
        choice = _codec_of(chosen(session, codec, "DiLoCo"))
        number = api.next_number(session, "diloco")
        name = f"diloco{number}"
        self._told = report_of(session).exchanged_rarely(name, self._schedule.every, LEFT if session.size > 1 else "")
        settings = f"every={self._schedule.every}, delay={self._schedule.delay}, mix={mix:g}, outer={'a function' if rule is None else rule.canonical}, on={on}"
        agree = partial(_agree, session, f"{name} settings", settings)
        self._fragments: Sequence[Fragment | HeldFragment]
        self._front: _Front | None = None
        if on == "servers":
            assert rule is not None
            self._fragments = _on_servers(session, name, model, parts, choice, rule)
            agree()
        else:
            make = outer if rule is None else _optimizer_of(rule)
            assert not isinstance(make, str)
            own = _on_workers(session, name, model, parts, choice, make, number)
            together([agree, *(each.declare for each in own)])
            self._fragments, self._front = own, _Front(own)
        self.inner, self.steps, self._sharded = inner, 0, sharding_modules(model)
        self._buffers = partial(_buffers, model)
        self._own_numbers = rule is not None  # of the outer optimizer, whatever a state says
        self._rendezvous = Rendezvous(session, name, len(parts))
        self._entered: dict[int, int] = {}  # by fragment that is under way, where its ranks meet
        self._met = 0  # the step after which all ranks last had the same parameters by ``finish()``
        self._as_met: list[int] | None = self._versions()  # of parameters, as they were then; None: they were loaded
        # By fragment, the step from which on what this rank has beyond the outer parameters was done, but for what was mixed in. All ranks count the same.
        self._since = [0] * len(parts)
        self._hook: Steps | None = None  # None: the inner optimizer's steps are its own affair
        amp.install()
        self._count()

    # a context manager

    def __enter__(self) -> DiLoCo:
        self._count()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._psgc_count_no_more()

    def _count(self) -> None:
        """Hear of the inner optimizer's steps from now on, in place of another that did. Raises UsageError where that has steps to exchange."""
        if self._hook is None:
            count(self.inner, self)
            self._hook = Steps(self.inner, self._stepped)
            self._psgc_skipped = self.inner._psgc_skipped = self._stepped  # type: ignore[attr-defined]  # where a GradScaler skips a step

    def _psgc_count_no_more(self) -> None:
        """Its steps are the inner optimizer's own affair from now on."""
        forget(self.inner, self)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for each in (self, self.inner):
            if vars(each).get("_psgc_skipped") == self._stepped:
                del each._psgc_skipped  # type: ignore[union-attr]

    def _refuse_uncounted(self, call: str) -> None:
        if self._hook is None:
            raise UsageError(
                f"DiLoCo.{call}: its block was left, or another DiLoCo took its place, and steps are exchanged no more; go on in another block of it, by "
                f"`with`"
            )

    @property
    def _psgc_counts_as(self) -> str:
        """In messages."""
        return "another DiLoCo"

    @property
    def _psgc_settled(self) -> bool:
        """Whether all ranks have the same parameters, with all steps that it has counted."""
        return self._met == self.steps or not (self._mix or any(self._apart) or any(fragment.under_way for fragment in self._fragments))

    @property
    def _apart(self) -> list[bool]:
        """By fragment, whether ranks have taken steps that are not in their outer parameters."""
        return [since < self.steps for since in self._since]

    def finish(self) -> None:
        """Take what is under way, and go on from the mean of all ranks' parameters, wherever they differ: all ranks then have the same. It is no outer step:
        outer parameters, momentum, residuals and the schedule stay as they are, so that a run that goes on exchanges as it would have. Every rank must call
        it, at one place between the same exchanges. Raises UsageError after the block."""
        self._refuse_uncounted("finish()")
        reshard(self._sharded)  # before pieces are written: what the outermost module has after an evaluation would be stale
        self._frozen.check()
        for place, fragment in enumerate(self._fragments):
            if fragment.under_way:
                self._take(place)
        differ = self._different()
        for fragment in differ:
            fragment.share()
        for fragment in differ:
            fragment.meet()
        self._met, self._as_met = self.steps, self._versions()
        self._told.finished(apart=bool(differ))

    def _versions(self) -> list[int]:
        """Of each trained parameter, how often it has been written."""
        return [local(parameter)._version for parameter in self._trained]

    def _different(self) -> list[Fragment | HeldFragment]:
        """The fragments of which some rank has other parameters than the outer ones, whoever has changed them: all ranks find the same."""
        as_met = self._met == self.steps and self._as_met in (None, self._versions())
        apart = [not as_met and fragment.differs() for fragment in self._fragments]
        coming = self._schedule.next_leaving(self.steps)  # another rank's next exchange, if that goes on
        found = self._rendezvous.check(self._rendezvous.enter(coming, apart), self.steps)
        return [fragment for fragment, differs in zip(self._fragments, found, strict=True) if differs]

    def _leave(self, place: int) -> None:
        self._fragments[place].leave()
        self._entered[place] = self._rendezvous.enter(place)
        self._since[place] = self.steps

    def _take(self, place: int) -> None:
        """Without a mix, what was done since it left is dropped."""
        self._met_others(place)
        self._fragments[place].take(self._mix)
        if not self._mix:
            self._since[place] = self.steps

    def _met_others(self, place: int) -> None:
        """Whoever has left with the fragment has come to its exchange, too. Raises UsageError."""
        if (entered := self._entered.pop(place, None)) is not None:
            self._rendezvous.check(entered, self.steps)

    # like the inner optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimizer, and what is due after it. Raises UsageError after the block."""
        self._refuse_uncounted("step()")
        return self.inner.step() if closure is None else self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's. Schedulers of torch take the inner optimizer itself."""
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The steps taken, outer parameters, the outer optimizer's state, what codecs keep on this rank, and this rank's buffers and, where they are others
        than the outer ones, parameters: a file for each rank, beside the model's and the inner optimizer's. Every rank must ask, between the same two steps.
        What is under way is waited for, and is in the state: it is taken when it would have been."""
        self._told.saved()
        return {
            "steps": self.steps, "met": self._met, "since": list(self._since), "fragments": [fragment.state() for fragment in self._fragments],
            "buffers": {name: on_host(buffer) for name, buffer in self._buffers().items()},
            "residuals": None if self._front is None else self._front.state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of this rank, in a job of as many ranks with the same fragments. Every rank must call it, with the model's and the inner
        optimizer's state loaded, too, before DiLoCo is made or after: what rank 0's parameters and buffers took the place of then is this rank's again. What is
        under way is dropped. An outer rule's numbers are those that it was made with, not the state's; a function's optimizer takes the state's, as torch's do.
        Raises UsageError for what does not fit, and nothing is changed then."""
        if not isinstance(state, Mapping) or not {"steps", "met", "since", "fragments", "residuals"} <= set(state):
            raise UsageError("DiLoCo: this is no state of a DiLoCo's state_dict()")
        if len(state["fragments"]) != len(self._fragments):
            raise UsageError(
                f"DiLoCo: the state is of {len(state['fragments'])} fragments, and this has {len(self._fragments)}; make it with as many"
            )
        if (state["residuals"] is None) != (self._front is None):
            there = "servers" if state["residuals"] is None else "workers"
            raise UsageError(f'DiLoCo: the state is of outer steps on {there}; make it with on="{there}"')
        for fragment, of in zip(self._fragments, state["fragments"], strict=True):
            fragment.check_state(of)
        if self._front is not None:
            self._front.shares(state["residuals"], by="DiLoCo.load_state_dict")
        reshard(self._sharded)  # before pieces are written, as in ``finish``
        for place, (fragment, of) in enumerate(zip(self._fragments, state["fragments"], strict=True)):
            self._met_others(place)
            fragment.go_on(of, self._own_numbers)
        for name, buffer in self._buffers().items():
            saved_one = state.get("buffers", {}).get(name)
            if saved_one is not None and saved_one.shape == buffer.shape:  # else what the model has by itself
                buffer.copy_(saved_one)
        self.steps, self._met, self._since, self._as_met = state["steps"], state["met"], list(state["since"]), None
        if self._front is not None:
            self._front.go_on(state["residuals"])

    @uncompiled
    def _stepped(self) -> None:
        """The inner optimizer has taken a step; or a GradScaler has skipped it, on this rank and perhaps no other: it counts all the same."""
        counted(self)
        self.steps += 1
        taken, leaving = self._schedule.taken(self.steps), self._schedule.leaving(self.steps)
        if taken is not None or leaving is not None:
            reshard(self._sharded)
        if taken is not None and self._fragments[taken].under_way:
            self._take(taken)
        if leaving is not None:
            self._frozen.check()
            self._averaged.check()
            self._leave(leaving)
            if not self._schedule.delay:
                self._take(leaving)
        self._told.stepped(settled=self._psgc_settled)


class _Front(FrontEnd[FilledBucket]):
    """What the exchanges of all fragments are to the session, and to states that are saved."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        kinds = {saved.GRADIENTS if not place else f"fragment {place}": fragment.exchange for place, fragment in enumerate(fragments)}
        super().__init__(fragments[0].exchange)
        self.kinds = dict(kinds)

    @property
    def keeps_mean(self) -> bool:
        return False

    def check_leaving(self) -> None:
        raise UsageError("suspend(): DiLoCo cannot go on in a job of another size; save its state, and start a new job")


def _agree(session: Session, name: str, own: str) -> None:
    """Raise UsageError where this rank's numbers are others than rank 0's: ranks would exchange what does not belong together, or wait for each other."""
    rank = session.whole.rank  # in messages, the job's
    if session.rank == 0:
        session.publish(name, f"{rank} {own}".encode())
        return
    first, its = session.lookup(name).decode().split(" ", 1)
    if its != own:
        raise UsageError(f"DiLoCo: rank {first} has {its}, and rank {rank} has {own}; every rank makes it with the same numbers")


def local_sgd(
    model: torch.nn.Module, inner: torch.optim.Optimizer, *, every: int, codec: Given = None, on: Literal["workers", "servers"] = "workers"
) -> DiLoCo:
    """LocalSGD: every rank trains by itself, and goes on from the mean of all after every ``every``-th step. See ``DiLoCo``."""
    return DiLoCo(model, inner, every=every, outer="average", codec=codec, on=on)


def _on_servers(
    session: Session, name: str, model: torch.nn.Module, parts: Sequence[dict[str, torch.Tensor]], choice: Choice, rule: UpdateRule
) -> list[HeldFragment]:
    """Rank 0's parameters and buffers are everyone's once they are made. Raises UsageError, CodecError."""
    _check_servers(session, choice)
    held = {key for part in parts for key in part}  # the servers give everyone rank 0's of these
    for key, parameter in model.named_parameters():
        refuse_pieces(parameter, key, 'DiLoCo(on="servers")', 'use on="workers"')
    broadcast_parameters({key: value for key, value in _first(model).items() if key not in held}, prefix=f"{name}.")
    return [HeldFragment(session, f"{name}.{place}", choice.codec, part, rule.canonical) for place, part in enumerate(parts)]


def _on_workers(
    session: Session, name: str, model: torch.nn.Module, parts: Sequence[dict[str, torch.Tensor]], choice: Choice, make: Outer, turn: int
) -> list[Fragment]:
    """The same, not declared yet. turn: the first fragment's."""
    for key, parameter in model.named_parameters():
        check_replicated(parameter, key, session, "DiLoCo")
    refuse_averaged(model, session, "DiLoCo")
    broadcast_parameters(_first(model), prefix=f"{name}.")
    try:
        return [Fragment(session, f"{name}.{place}", turn + place, choice, each, make) for place, each in enumerate(parts)]
    except CodecError as error:
        raise CodecError(f"DiLoCo: {error}") from None


def _first(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, of which rank 0's are everyone's, also buffers that are not saved: of sharded ones, pieces. What modules say of themselves
    besides (``get_extra_state``) is each rank's own."""
    named = {plain_name(key): local(value) for key, value in first_values(model).items()}
    return {key: value for key, value in named.items() if value.numel()}


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that the model saves. Rank 0's were everyone's, and they are each rank's own since. The others it makes anew."""
    saved_ones = {plain_name(name) for name in model.state_dict()}
    named = ((plain_name(name), buffer) for name, buffer in model.named_buffers())
    return {name: local(buffer).detach() for name, buffer in named if name in saved_ones and buffer.numel()}


def _rule(outer: str | Outer) -> UpdateRule | None:
    """None: a function makes the optimizer. Raises UsageError for a rule that is no outer step."""
    if not isinstance(outer, str):
        if not callable(outer):
            raise UsageError(
                f'DiLoCo: outer is a {type(outer).__name__}: expected text such as "average", or a function that makes an optimizer of the outer '
                f"parameters: lambda tensors: torch.optim.SGD(tensors, lr=0.7)"
            )
        return None
    rule = UpdateRule.parse(outer)
    if rule.name == "add" or not rule.in_rounds:
        raise UsageError(
            f"DiLoCo: outer={outer!r}: expected average, or nesterov with lr and momentum, or a function that makes an optimizer"
        )
    return rule


def _optimizer_of(rule: UpdateRule) -> Outer:
    """torch's own, which takes the same step."""
    if rule.name == "average":
        return lambda tensors: torch.optim.SGD(tensors, lr=1.0)
    return lambda tensors: torch.optim.SGD(tensors, lr=rule.lr, momentum=rule.momentum, nesterov=rule.momentum > 0)


def _check_servers(session: Session, choice: Choice) -> None:
    """Raises UsageError where servers cannot hold the outer parameters; CodecError for a codec by which progress cannot be pushed to them."""
    if not session.config.solo and not session.config.servers:
        raise UsageError('DiLoCo: on="servers", but this job has none: start some (psgc run --servers 1, DMLC_NUM_SERVER), or leave it out')
    if choice.rule is not None:
        raise UsageError('DiLoCo: on="servers" takes one codec for all parameters; name it, or use on="workers"')
    one_way(choice.codec)


def _codec_of(choice: Choice) -> Choice:
    """Raises UsageError for a plan, which is of gradients of every step."""
    if choice.auto or choice.plan is not None or choice.awaited:
        raise UsageError("DiLoCo takes a codec: plans (PSGC_PLAN, auto) are of gradients that are exchanged in every step")
    return choice
