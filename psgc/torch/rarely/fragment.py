"""A part of a model that ranks exchange at once: how far its parameters have come since the last exchange, and the outer optimizer's step on the mean of that.

Owns the *outer* parameters: what all ranks had after the last exchange, alike on all of them, since every rank takes the same steps on the same means.
Parameters of lower precision are held as float32; of a sharded one, this rank's piece, which is the same piece on all ranks that exchange.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.plans.choice import Choice
from psgc.torch.rarely.schedule import whole
from psgc.torch.tensors.declaring import plain_name, spec_of
from psgc.torch.tensors.held import held_dtype, rounded
from psgc.torch.tensors.push_pull import push_pull_async_inplace, synchronize
from psgc.torch.tensors.sent import FilledBucket
from psgc.torch.tensors.shards import local, reshard, sharding_modules
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
SHARED: Final = "bf16"  # by which progress travels for a mean of all ranks where a codec is to lose something


class Fragment:
    """parameters: by name, of this rank, which may have nothing of a fragment whose parameters are sharded; outer: makes the outer optimizer. Raises CodecError
    for a codec that cannot carry them.

    under_way: it has left, and its mean is not taken yet; that may be here already."""

    def __init__(
        self, session: Session, name: str, turn: int, choice: Choice, parameters: Mapping[str, torch.Tensor], outer: Outer
    ) -> None:
        self.exchange: GradientExchange[FilledBucket] = GradientExchange(session, name, choice, whole=True, turn=turn, scaled=False)
        here = {name: parameter for name, parameter in parameters.items() if local(parameter).numel()}
        self.names, self._parameters = list(here), list(here.values())
        self.outer = [
            torch.nn.Parameter(local(parameter).detach().to(held_dtype(parameter, name, "DiLoCo")).clone(), requires_grad=True)
            for name, parameter in here.items()
        ]
        self.optimizer = outer(self.outer) if here else None
        self.exchange.specs = tuple(
            spec_of(tensor, name, f"parameter {name!r}") for name, tensor in zip(self.names, self.outer, strict=True)
        )
        if here:
            self.exchange.check(self.exchange.specs, self.outer)
        self.under_way, self._here = False, False
        self._said = False  # that a mean held NaN or infinity
        self._meeting: list[tuple[list[int], int]] = []  # which parameters' mean of all ranks is on its way, and its handle

    def declare(self) -> None:
        """Wait until every rank has declared it, if it is not yet, or not any more: a codec's state was loaded. Any thread may call."""
        exchange, everything = self.exchange, tuple(range(len(self.outer)))
        if self.outer and not exchange.declared:
            exchange.declare(lambda made: FilledBucket.all_of(made.layout, made.on_gpu), exchange.specs, self.outer, everything, everything)

    def leave(self) -> None:
        """Send how far the parameters have come, as a gradient of the outer ones: what they were, minus what they are."""
        self.under_way, self._here = True, not self.outer
        if self._here:
            return
        exchange = self.exchange
        exchange.begin()
        self.declare()
        for bucket in exchange.buckets:
            for index in bucket.bucket.tensors:
                progress = self.outer[index].grad = self._progress(index)
                bucket.put(index, progress)
            exchange.submit(bucket)

    def arrive(self) -> None:
        """Wait for the mean of what is under way, which is taken later. Until then it is the outer parameters' gradient."""
        if not self.under_way or self._here:
            return
        exchange = self.exchange
        exchange.wait()
        for bucket in exchange.buckets:
            bucket.arrive()
            bucket.take()
        exchange.deliver()
        exchange.end_step()
        self._here = True
        self._say_nonfinite()

    def _say_nonfinite(self) -> None:
        """Once, of the first mean with NaN or infinity: momentum keeps it, so nothing would become of the parameter any more."""
        session = self.exchange.session
        if session.rank or self._said:
            return
        found = [
            name for name, outer in zip(self.names, self.outer, strict=True) if outer.grad is not None and not outer.grad.isfinite().all()
        ]
        if found:
            self._said = True
            logger.warning(
                "DiLoCo: what the ranks have exchanged of %d parameter(s) holds NaN or infinity, of which some rank's has it, first %r: all ranks have it "
                "from now on; PSGC_NONFINITE=raise ends the job instead, and names the rank",
                len(found), found[0],
            )  # fmt: skip

    def take(self, mix: float) -> None:
        """Wait for the mean, take the outer step on it, and go on from there: from the outer parameters, with ``mix`` times what this rank has beyond them."""
        self.arrive()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.follow(mix)
        self.under_way = self._here = False

    @torch.no_grad()
    def differs(self) -> bool:
        """Whether this rank's parameters are others than the outer ones."""
        pairs = zip(self._parameters, self.outer, strict=True)
        return not all(torch.equal(local(parameter), outer.to(parameter.dtype)) for parameter, outer in pairs)

    @torch.no_grad()
    def share(self) -> None:
        """Send what the mean of all ranks' parameters is made of, how far they have come: in bf16 where the fragment's codec loses something, whatever that
        is. One that sends a few elements leaves the rest to its residual, which has no part in this."""
        lossy = self.exchange.choice.codecs(dict(zip(self.outer, self.names, strict=True))) != ["none"]
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, outer in enumerate(self.outer):
            alike.setdefault((outer.dtype, outer.device), []).append(index)
        for number, ((dtype, _), indices) in enumerate(alike.items()):
            flat = torch.cat([self._progress(index).reshape(-1) for index in indices])
            codec = SHARED if lossy and dtype == torch.float32 else "none"
            self._meeting.append((indices, push_pull_async_inplace(flat, name=f"{self.exchange.name}.mean{number}", compression=codec)))

    @torch.no_grad()
    def meet(self) -> None:
        """After ``share``: wait for the mean, and go on from it. The outer parameters stay as they are, and so what it is beyond them is progress still."""
        for indices, handle in self._meeting:
            flat = synchronize(handle)
            assert flat is not None
            sizes = [self.outer[index].numel() for index in indices]
            for index, mean in zip(indices, torch.split(flat, sizes), strict=True):
                own, outer = local(self._parameters[index]), self.outer[index]
                own.copy_(rounded(outer, own.dtype) - mean.view_as(outer))
        self._meeting = []

    def _progress(self, index: int) -> torch.Tensor:
        """How far a parameter has come, as a gradient of the outer one. Where it is of lower precision, it was the outer one rounded: what the rounding took
        is no progress."""
        own, outer = local(self._parameters[index]).detach(), self.outer[index].detach()
        return torch.sub(rounded(outer, own.dtype), own.to(outer.dtype))

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """Go on from the outer parameters, as of ``take``."""
        for parameter, outer in zip(self._parameters, self.outer, strict=True):
            own = local(parameter)
            now = outer.to(own.dtype)
            own.copy_(torch.lerp(now, own, mix) if mix else now)

    def state(self) -> dict[str, Any]:
        """The outer parameters by name, this rank's own where they are others, and the outer optimizer's state; of what is under way, the mean."""
        self.arrive()
        named = dict(zip(self.names, self.outer, strict=True))
        return {
            "outer": {name: tensor.detach().clone() for name, tensor in named.items()},
            "own": {name: on_host(own) for name, own in zip(self.names, self._parameters, strict=True)} if self.differs() else None,
            "kind": type(self.optimizer).__qualname__,
            "optimizer": {} if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict()),
            "under_way": {n: tensor.grad.clone() for n, tensor in named.items() if tensor.grad is not None} if self.under_way else None,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError for a state of other parameters, or of an outer optimizer of another kind."""
        check_outer(state["outer"], dict(zip(self.names, self.outer, strict=True)))
        if (kind := type(self.optimizer).__qualname__) != state["kind"]:
            raise UsageError(
                f"DiLoCo: the state's outer optimizer is {state['kind']}, and this one's is {kind}; make it with the same outer"
            )

    @torch.no_grad()
    def go_on(self, state: Mapping[str, Any], own_numbers: bool) -> None:
        """From ``state()``, which has been checked. own_numbers: the outer optimizer keeps its rate and the like, and takes from the state what it
        remembers alone."""
        self.arrive()
        means, named = state["under_way"], dict(zip(self.names, self.outer, strict=True))
        for name, tensor in named.items():
            tensor.copy_(state["outer"][name])
            tensor.grad = None if means is None else means[name].to(tensor.device, tensor.dtype, copy=True)
        if self.optimizer is not None:
            numbers = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            for group, own in zip(self.optimizer.param_groups, numbers, strict=True) if own_numbers else ():
                group.update(own)
        self.under_way = self._here = means is not None
        if "own" in state:  # not in those of earlier versions
            restore_own(dict(zip(self.names, self._parameters, strict=True)), named, state["own"])


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what of it is on this rank, in a state that is saved."""
    return local(tensor).detach().to("cpu", copy=True)


@torch.no_grad()
def restore_own(parameters: Mapping[str, torch.Tensor], outer: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor] | None) -> None:
    """Have this rank's parameters be as they were saved: the outer ones where that is all there was to save."""
    for name, parameter in parameters.items():
        local(parameter).copy_((outer if own is None else own)[name])


def check_outer(saved: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError where saved outer parameters have other names or shapes."""
    if list(saved) != list(here):
        raise UsageError("DiLoCo: the state's fragments have other parameters; is it another model's, or another list of modules?")
    for name, tensor in here.items():
        if saved[name].shape != tensor.shape:
            raise UsageError(
                f"DiLoCo: {name!r} has shape {list(saved[name].shape)} in the state, and {list(tensor.shape)} here; is it another model's?"
            )


def together(calls: Iterable[Callable[[], None]]) -> None:
    """Make calls that wait for other ranks at once, so that all take the round trips of one. Raises what the first of them raises."""
    failed: list[BaseException] = []

    def make(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(call,), name="psgc-declare", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class Frozen:
    """Which parameters of a model are frozen, and in no fragment, and which are trained, all of them in fragments: neither changes. by: whose fragments they
    are, for errors. Raises UsageError as ``check`` does."""

    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer, by: str) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                f"{by}: the inner optimizer is a {type(inner).__name__}, expected one of torch's kind: {by}(model, inner, every=...)"
            )
        self._model, self._inner, self._by = model, inner, by
        self._parameters = [(name, each, each.requires_grad) for name, each in model.named_parameters()]
        self._known = {id(each) for _, each, _ in self._parameters}
        self.check()

    def check(self) -> None:
        """Raise UsageError for a parameter that is trained now and in no fragment, which nobody would exchange, and for one that is frozen now, which would go
        on moving. Modules of FSDP2's have been resharded."""
        by = self._by
        for name, parameter, trained in self._parameters:
            if parameter.requires_grad and not trained:
                raise UsageError(
                    f"{by}: parameter {name!r} is trained now, and was frozen when {by} was made, so that it is in no fragment and would not be "
                    f"exchanged; train it from the start, or call finish() first, and make another {by}"
                )
            if trained and not parameter.requires_grad:
                raise UsageError(
                    f"{by}: parameter {name!r} is frozen now, and was trained when {by} was made, so that it is in a fragment, whose exchanges and outer "
                    f"momentum would move it; call finish() before it is frozen, and make another {by}"
                )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise UsageError(
                    f"{by}: parameter {name!r} was not the model's when {by} was made, so that it is in no fragment and would not be exchanged; call "
                    f"finish() before it is added or replaced, and make another {by}"
                )
        for number, group in enumerate(self._inner.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise UsageError(
                        f"{by}: parameter {place} of the inner optimizer's group {number}, of shape {list(parameter.shape)}, is not the model's, so that it "
                        f"is in no fragment and would not be exchanged; give {by} a model that has it, or train it by another optimizer"
                    )


def parts_of(model: torch.nn.Module, fragments: int | Sequence[torch.nn.Module], by: str) -> list[dict[str, torch.Tensor]]:
    """The trained parameters of each fragment, by names that are the same with torch.compile and without. by: whose they are, for errors. Raises UsageError."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{by}: the model is a {type(model).__name__}, expected a torch.nn.Module: {by}(model, inner, every=...)")
    reshard(sharding_modules(model))  # after an evaluation FSDP2's outermost module has whole parameters, whose memory it takes away
    named = [(plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UsageError(f"{by}: the model has no parameters that require a gradient")
    if not isinstance(fragments, Iterable):
        fragments = whole(fragments, f"{by}: fragments")
        if fragments < 1:
            raise UsageError(f"{by}: fragments={fragments}: expected at least 1 fragment, or a list of modules")
        if fragments > len(named):
            raise UsageError(f"{by}: {fragments} fragments of {len(named)} parameters; choose at most as many")
        return divided(named, fragments)
    left: dict[str, torch.Tensor] = dict(named)
    parts: list[dict[str, torch.Tensor]] = []
    for place, module in enumerate(fragments):
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"{by}: fragment {place} is a {type(module).__name__}: expected a number, or a list of modules of the model")
        own = {id(parameter) for parameter in module.parameters()}
        part = {name: parameter for name, parameter in left.items() if id(parameter) in own}
        if not part:
            raise UsageError(
                f"{by}: fragment {place}, a {type(module).__name__}, has no trained parameters of the model that are in no fragment before it"
            )
        parts.append(part)
        left = {name: parameter for name, parameter in left.items() if name not in part}
    return [*parts, left] if left else parts


def divided(named: Sequence[tuple[str, torch.Tensor]], fragments: int) -> list[dict[str, torch.Tensor]]:
    """The parameters in this many runs of neighbours, nearly as large as each other; none is empty."""
    total, runs, so_far = sum(parameter.numel() for _, parameter in named), list[dict[str, torch.Tensor]](), 0
    for place, (name, parameter) in enumerate(named):
        left = len(named) - place
        full = runs and so_far + parameter.numel() // 2 >= total * len(runs) / fragments
        if not runs or (len(runs) < fragments and (full or left <= fragments - len(runs))):
            runs.append({})
        runs[-1][name] = parameter
        so_far += parameter.numel()
    return runs
