"""The state of a training in a step, as a process needs it that takes a dead worker's place and begins with that step.

The optimizer's parameters and its state change only by its updates, so they are read where they lie, when somebody asks, with the number of updates
that they have had in the step: who takes them leaves out so many. The optimizer's options, which a schedule may change after an update, are kept as they
were after the last one. Everything else may change during a step, and is copied at its beginning: buffers, parameters that the optimizer leaves alone (a
moving average's, frozen ones), and other objects' states as bytes.

Of p.grad it is said whether it is there at the beginning, for an optimizer treats zeros otherwise than None. What is in it is not given: that would be a copy
of all gradients at each step. So a step that uses it is refused, on every rank and before the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, Protocol

import torch

from psgc.errors import UsageError
from psgc.torch.ddp.told import optimizers_in
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.wrapping import named_parameters_of
from psgc.torch.tensors import plain
from psgc.torch.tensors.apart import mapped, put_tensors, take_tensors
from psgc.torch.tensors.push_pull import follow_unnamed, unnamed_calls
from psgc.worker.session import Progress, Session

WHOSE: Final = "Elastic"
NONE, ZEROS, LEFT = "nzl"  # a p.grad at a step's beginning: None, as zero_grad(set_to_none=False) left it, or with anything else in it


class Stateful(Protocol):
    """What has a state: a scheduler, a loss scaler, a sampler, a data loader."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Beginning:
    """Of a step. kept, buffers, apart (parameters, by name): what may change during it. ended: all steps have been taken. updates: that the
    optimizer's state has had in the step; options: of its groups then. members: ranks that take part, as known at the beginning."""

    step: int
    kept: bytes
    buffers: Mapping[str, torch.Tensor]
    apart: Mapping[str, torch.Tensor]
    ended: bool
    updates: int
    options: Sequence[Mapping[str, Any]]
    members: tuple[int, ...]


class TrainingState:
    """See the module's text. extra: by name."""

    def __init__(self, session: Session, model: torch.nn.Module, optimizer: Distributed, extra: Mapping[str, Stateful]) -> None:
        self._session, self._model, self._optimizer, self._extra = session, model, optimizer, extra

    def beginning(self, step: int, ended: bool, members: tuple[int, ...]) -> Beginning:
        """Of this step. Raises as ``kept``."""
        kept = self.kept()
        # where they lie: nothing waits for a device
        buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        apart = {name: parameter.detach().clone() for name, parameter in self._apart()}
        return Beginning(step, kept, buffers, apart, ended, 0, self._options(), members)

    def kept(self) -> bytes:
        """What is neither the model's nor the optimizer's, between two steps. Raises UsageError for a state that is not of plain types, and where the last step
        is not over."""
        exchange = self._optimizer._psgc_gradients.exchange
        if exchange.declarations > 1:
            raise UsageError(
                f"{WHOSE}: gradients were declared again in the middle of the training (parameters were added, or switch_plan() was called), which a process "
                f"that takes a dead worker's place cannot follow; or set PSGC_ON_WORKER_LOSS=stop"
            )
        self._optimizer._psgc_gradients.settle()
        self._session.wait_for_all()  # what a dead rank has not given of the last step, its successor gives in that step only
        progress = self._session.progress
        kept = {
            "last": exchange.last.told(), "steps": dict(progress.steps), "barriers": progress.barriers,
            "unnamed": unnamed_calls(self._session), "gradients": self._gradients_left(),
            "extra": {name: _plain(of.state_dict()) for name, of in self._extra.items()},
        }  # fmt: skip
        return plain.encode(kept, "state", WHOSE)

    def _gradients_left(self) -> str:
        """A letter for each of the optimizer's parameters. What is left in one from now on is not to be used."""
        own = self._optimizer._psgc_gradients.gradients
        found = []
        for parameter in self._in_order():
            gradient = own[own.index(parameter)] if own.knows(parameter) else None
            letter = NONE if parameter.grad is None else ZEROS if gradient is not None and gradient.zeroed else LEFT
            if gradient is not None:
                gradient.mean.note_old(letter == LEFT)
            found.append(letter)
        return "".join(found)

    def _leave_gradients(self, letters: str) -> None:
        """Have p.grad as another rank has it, but for what is in it."""
        gradients = self._optimizer._psgc_gradients
        gradients.watch()
        for parameter, letter in zip(self._in_order(), letters, strict=True):
            own = gradients.gradients[gradients.gradients.index(parameter)] if gradients.knows(parameter) else None
            parameter.grad = None if letter == NONE else torch.zeros_like(parameter)
            if letter == ZEROS and own is not None:
                own.note_zero()

    def check_gradients(self) -> None:
        """Raise UsageError where the update that is about to be made uses what was in a p.grad at the step's beginning."""
        for gradient in self._optimizer._psgc_gradients.gradients:
            if gradient.mean.has_old:
                raise UsageError(
                    f"{WHOSE}: the gradient of {gradient.spec.name!r} still has what an earlier step left in p.grad, which a process that takes a dead "
                    f"worker's place would not have; call optimizer.zero_grad() in each step before backward(), or set PSGC_ON_WORKER_LOSS=stop"
                )

    def check_trained(self) -> None:
        """Raise UsageError for a parameter of the model that something else than the optimizer trains: an update of that which another rank has made already
        would be made twice. And for one that the optimizer trains and the model does not have: other ranks would not get it."""
        mine, gradients = self._optimized(), self._optimizer._psgc_gradients
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter not in mine:
                raise UsageError(
                    f"{WHOSE}: the optimizer does not have parameter {name!r} of the model, which requires a gradient; give all of the model's to one "
                    f"DistributedOptimizer, in groups, or requires_grad_(False) to what is not trained"
                )
        models = set(self._model.parameters())
        for _, name, each in named_parameters_of(self._optimizer, self._optimizer._psgc_names):
            if each not in models and (each.requires_grad or gradients.knows(each)):
                raise UsageError(
                    f"{WHOSE}: the model does not have parameter {name!r} of the optimizer, which other ranks would not get; give Elastic a model that has "
                    f"all that is trained, such as torch.nn.ModuleList([model, criterion])"
                )

    def left_out(self) -> list[str]:
        """The model's modules that save something besides tensors, which is not part of the state."""
        plain = torch.nn.Module.get_extra_state
        return [name or "the model" for name, module in self._model.named_modules() if type(module).get_extra_state is not plain]

    def check_alone(self) -> None:
        """Raise UsageError where another DistributedOptimizer of this job has averaged gradients, too: what it has trained would not get to other processes."""
        for other in optimizers_in(self._session):
            if other is not self._optimizer._psgc_gradients and other.exchange.declarations:
                raise UsageError(
                    f"{WHOSE}: gradients of a second DistributedOptimizer were averaged in its loop, whose updates a process that takes a dead worker's place "
                    f"could not follow; have one optimizer for all that is trained, with a group of parameters for each, or set PSGC_ON_WORKER_LOSS=stop"
                )

    def _in_order(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _optimized(self) -> set[torch.Tensor]:
        return set(self._in_order())

    def _apart(self) -> list[tuple[str, torch.Tensor]]:
        """The model's parameters that no update changes. One whose gradient is averaged may lack the requirement for a while, as GANs' do."""
        mine, gradients = self._optimized(), self._optimizer._psgc_gradients
        return [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter not in mine or not (parameter.requires_grad or gradients.knows(parameter))
        ]

    def updated(self, beginning: Beginning) -> Beginning:
        """The same after one more update."""
        return replace(beginning, updates=beginning.updates + 1, options=self._options())

    def _options(self) -> list[dict[str, Any]]:
        return [{name: deepcopy(value) for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups]

    def read(self, beginning: Beginning) -> tuple[bytes, list[torch.Tensor]]:
        """All of it, while no update is made: what there is, and the tensors that it names."""
        tensors: list[torch.Tensor] = []
        optimizer = self._optimizer.state_dict()
        groups = [
            {**options, "params": group["params"]} for options, group in zip(beginning.options, optimizer["param_groups"], strict=True)
        ]
        whole = {
            "step": beginning.step, "ended": beginning.ended, "updates": beginning.updates, "kept": beginning.kept, "members": list(beginning.members),
            "buffers": dict(beginning.buffers), "parameters": {**dict(self._model.named_parameters()), **beginning.apart},
            "optimizer": {**optimizer, "param_groups": groups},
        }  # fmt: skip
        head = plain.encode(take_tensors(whole, tensors), "state", WHOSE)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the last update may have been made on another stream than this thread's
        return head, [tensor.detach() for tensor in tensors]

    @staticmethod
    def places(head: bytes) -> tuple[Any, list[torch.Tensor]]:
        """What ``read`` has given, with tensors to be filled, in the same order. Raises RemoteProtocolError."""
        tensors: list[torch.Tensor] = []
        return put_tensors(plain.decode(head), tensors), tensors

    def take(self, whole: Mapping[str, Any]) -> Beginning:
        """Go on from what another rank has read. Raises UsageError for the state of another script."""
        kept = plain.decode(whole["kept"])
        with torch.no_grad():
            _copy(dict(self._model.named_parameters()), whole["parameters"], "parameter")
            _copy(dict(self._model.named_buffers()), whole["buffers"], "buffer")
        self._optimizer.load_state_dict(whole["optimizer"])
        if set(kept["extra"]) != set(self._extra):
            raise UsageError(
                f"{WHOSE}: the other ranks have {sorted(kept['extra'])} as extra, this one {sorted(self._extra)}; run one script"
            )
        for name, of in self._extra.items():
            of.load_state_dict(_like(kept["extra"][name], of.state_dict()))
        self._optimizer._psgc_gradients.exchange.last.follow(kept["last"])
        self._session.catch_up(Progress(kept["steps"], kept["barriers"]))
        follow_unnamed(self._session, kept["unnamed"])
        self._leave_gradients(kept["gradients"])
        apart = {name: whole["parameters"][name] for name, _ in self._apart()}
        return Beginning(
            whole["step"], whole["kept"], whole["buffers"], apart, whole["ended"], whole["updates"], self._options(), tuple(whole["members"])
        )  # fmt: skip


def _copy(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], what: str) -> None:
    for name in (*mine, *theirs):
        if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape or mine[name].dtype != theirs[name].dtype:
            raise UsageError(f"{WHOSE}: {what} {name!r} is not the same on this rank as on the others; run one script")
    for name, tensor in mine.items():
        tensor.copy_(theirs[name])


def _plain(value: Any) -> Any:
    """Dicts of other kinds as dicts, so that they can be encoded."""
    return mapped(value, lambda leaf: leaf)


def _like(value: Any, mine: Any) -> Any:
    """``value`` with the kinds of dicts that ``mine`` has at the same places."""
    if isinstance(mine, Counter):
        return Counter(value)
    if isinstance(mine, dict) and isinstance(value, dict):
        return {key: _like(item, mine.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple) and type(mine) is type(value):
        return type(value)(_like(item, own) for item, own in zip_longest(value, mine[: len(value)]))
    return value
