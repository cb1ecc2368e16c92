"""Adam for compressed communication: OneBitAdam and ZeroOneAdam. Gradients stay on their rank; the momenta travel.

Under plain Adam a coarse codec spoils the second moment, because error feedback sends spikes. These two optimizers avoid that: steps that
update the variance average whole gradients, as DistributedOptimizer does, and are Adam's own steps; in all other steps the variance is
frozen, every rank adds its own gradient to its momentum, and the momenta are averaged, compressed both ways under error feedback.

Two choices are ours. What travels is the *update*, momentum over the root of the frozen variance: for a frozen variance that is the
same algorithm in other coordinates, and a codec's scale then fits tensors whose gradients differ by orders of magnitude. And no element of
a rank's update exceeds what Adam itself could make, max(1, (1 - beta1) / sqrt(1 - beta2)) (Kingma & Ba 2015, section 2.1), times the root
of the number of ranks, for the variance is that of their mean: an element that was quiet while its variance froze could else jump by
any amount, and take its block's scale with it.

Owns the arithmetic and the schedules; ``distributed`` and ``gradients/in_backward.py`` synchronize whole gradients, ``tensors/tensor_exchange.py``
the momenta.
Sources: Tang et al. 2021 (1-bit Adam), Algorithm 1; Lu et al. 2022 (0/1 Adam), Algorithm 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.torch.optimizers.distributed import Distributed, check_passes, spec_of
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.state.residuals import Residuals
from psgc.torch.state.saved import share_apart
from psgc.torch.tensors.codec_text import check_carries, codec_text
from psgc.torch.tensors.push_pull import push_pull_inplace
from psgc.torch.tensors.tensor_exchange import TensorExchange

Parameters = Iterable[Any]  # parameters, (name, parameter) pairs, or groups: dicts whose "params" holds either
Options = dict[str, Any]  # of a parameter group
State = dict[str, Any]  # of a parameter


class FrozenVarianceAdam(Distributed):
    """What both optimizers share; see the module's text.

    State of a parameter: ``exp_avg``, ``exp_avg_sq``, ``step`` (updates of the first), ``variance_steps`` (of the second). Every group
    has ``steps``: steps taken so far, the same in all groups, which the schedule is a function of.
    """

    def __init__(
        self, params: Parameters, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled_weight_decay: bool,
        codec: str, warmup_codec: str, backward_passes_per_step: int,
    ) -> None:  # fmt: skip
        for name, value, limit in (("lr", lr, float("inf")), ("betas[0]", betas[0], 1), ("betas[1]", betas[1], 1), ("eps", eps, 1)):
            if not 0 <= value < limit:
                raise UsageError(f"{type(self).__name__}: {name} is {value!r}, expected a number from 0 to below {limit}")
        check_passes(backward_passes_per_step)
        session = api.current_session()
        if session.config.plan:
            raise UsageError(
                f"{type(self).__name__} sends momenta by a codec of its own, not by PSGC_PLAN={session.config.plan}; run it without"
            )
        self._session = session
        self._codec = codec_text(codec, "float32")
        self._momenta: tuple[TensorSpec, ...] = ()
        self._exchange: TensorExchange | None = None
        self._exchanges = 0
        self._momentum_residuals = Residuals(session)
        self._psgc_join(session, {}, Choice(codec_text(warmup_codec, "float32")), backward_passes_per_step)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "steps": 0}
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled_weight_decay})
        self._follow_schedule()

    @abstractmethod
    def _averages_gradients(self, step: int) -> bool:
        """Whether step number ``step`` (the first is 0) averages whole gradients and updates the variance."""

    @abstractmethod
    def _compressed_step(self) -> None:
        """A step on this rank's own gradients."""

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return int(self.param_groups[0]["steps"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as the schedule has it. closure: run first, once; its loss is returned."""
        return super().step(closure)

    def add_param_group(self, param_group: Options) -> None:
        """As torch's, with (name, parameter) pairs welcome. Every rank must add the same, while gradients are still averaged."""
        given = param_group["params"]
        pairs = [given] if isinstance(given, torch.Tensor) else list(given)
        number = len(self.param_groups)
        parameters = []
        for index, pair in enumerate(pairs):
            name, parameter = pair if isinstance(pair, tuple) else (f"param.{number}.{index}", pair)
            if name in self._psgc_names.values():
                raise UsageError(f"{type(self).__name__}: two parameters are named {name!r}; give each its own name")
            if isinstance(parameter, torch.Tensor):  # torch refuses anything else
                check_carries(self._codec, parameter, name)
                check_carries(self._psgc_exchange.choice.codec, parameter, name)
                self._psgc_names[parameter] = name
            parameters.append(parameter)
        steps = self.steps if self.param_groups else 0
        super().add_param_group({**param_group, "params": parameters, "steps": steps})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. The state of a torch Adam or AdamW is welcome, too: it goes on where that left off."""
        super().load_state_dict(state_dict)
        taken = 0
        for state in self.state.values():
            state["step"] = int(state["step"])
            state.setdefault("variance_steps", state["step"])
            taken = max(taken, state["step"])
        for group in self.param_groups:
            group.setdefault("steps", taken)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._follow_schedule()

    @torch.no_grad()
    def _psgc_apply(self, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        if self._averages_gradients(self.steps):
            self._adam_step()
        else:
            self._compressed_step()
        for group in self.param_groups:
            group["steps"] += 1
        self._follow_schedule()
        return loss

    def _follow_schedule(self) -> None:
        """Have the next backward's gradients averaged, or left alone."""
        self._psgc_gradients.paused = not self._averages_gradients(self.steps)

    def _adam_step(self) -> None:
        """A step of AdamW (or Adam with L2) on averaged gradients, with the same operations in the same order as torch's."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = state["variance_steps"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                gradient = _gradient(parameter, group)
                _decay(parameter, _kept(group))
                state["step"] += 1
                state["variance_steps"] += 1
                beta1, beta2 = group["betas"]
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.addcdiv_(state["exp_avg"], _denominator(state, group), value=-_step_size(state, group))

    def _moving(self) -> list[tuple[Options, torch.Tensor]]:
        """The parameters with a variance, each with its group. Raises UsageError for a gradient that came too late to have one."""
        moving = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    moving.append((group, parameter))
                elif parameter.grad is not None:
                    raise UsageError(
                        f"parameter {self._name(parameter)!r} has its first gradient in step {self.steps + 1}, "
                        f"when the variance is frozen; let it take part in the warm-up on some rank, or make the warm-up longer"
                    )
        return moving

    def _own_update(self, parameter: torch.Tensor, group: Options) -> tuple[torch.Tensor, torch.Tensor]:
        """Add this rank's gradient (none counts as zeros) to its momentum; the momentum over the denominator, and the denominator."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if parameter.grad is None:
            state["exp_avg"].mul_(beta1)
        else:
            state["exp_avg"].lerp_(_gradient(parameter, group), 1 - beta1)
        state["step"] += 1
        denominator = _denominator(state, group)
        limit = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * self._session.size**0.5
        return (state["exp_avg"] / denominator).clamp_(-limit, limit), denominator

    def _average(self, moving: list[tuple[Options, torch.Tensor]], outgoing: Callable[[int], torch.Tensor]) -> None:
        """The compressed mean over all ranks of ``outgoing(i)``, one tensor for each of ``moving``, in place."""
        numbers = {id(group): number for number, group in enumerate(self.param_groups)}
        specs = tuple(spec_of(parameter, self._name(parameter), numbers[id(group)]) for group, parameter in moving)
        if self._exchange is None or specs != self._momenta:
            self._momentum_residuals.replace()
            declaration = self._momentum_residuals.declaration(self._declaration(specs))
            self._exchange = TensorExchange(self._session, declaration)
            self._momentum_residuals.add(self._exchange.layout, declaration)
            self._momenta = specs
        self._exchange.run(outgoing)

    def _declaration(self, specs: tuple[TensorSpec, ...]) -> Declaration:
        self._exchanges += 1
        config = self._session.config
        everything = tuple(range(len(specs)))
        return Declaration(
            name=f"{self._psgc_exchange.name}.momentum{self._exchanges}", kind="plan", tensors=specs, codec=self._codec, mean=True,
            order=everything, used=everything, part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes,
            min_compress_bytes=config.min_compress_bytes,
        )  # fmt: skip

    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As DistributedOptimizer's."""
        super().load_residual_state_dict(states)
        self._exchange = None

    def _psgc_switch(self, choice: Choice) -> None:
        raise UsageError(f"switch_plan: {type(self).__name__} sends momenta by a codec of its own, not by a plan; use DistributedOptimizer")

    def _psgc_residuals(self) -> dict[str, Residuals]:
        return super()._psgc_residuals() | {"momenta": self._momentum_residuals}

    def _name(self, parameter: torch.Tensor) -> str:
        return self._psgc_names[parameter]

    def _psgc_agree_on_overflow(self, flags: Iterable[torch.Tensor]) -> None:
        """Skip the step on all ranks if the loss scaler of any rank found an overflow in its own gradients."""
        if self._psgc_gradients.paused:
            for flag in flags:
                push_pull_inplace(flag, average=False, name=f"{self._psgc_exchange.name}.overflow")


class OneBitAdam(FrozenVarianceAdam):
    """1-bit Adam (Tang et al. 2021): ``warmup_steps`` of plain AdamW, then the variance is frozen and momenta travel compressed.

    params:        ``model.named_parameters()``, parameters, or groups of either, the same on every rank.
    warmup_steps:  steps before the variance is frozen; the paper takes 15-20 % of the training, and past the learning rate's own warm-up.
    codec:         of the momentum, both ways or ``push/pull``; PSGC_CODEC has no say. Its residual does not follow the learning rate.
    warmup_codec:  of the gradients during the warm-up: ``none`` or ``bf16``.
    decoupled_weight_decay: True: AdamW's; False: L2 added to the gradient. The other arguments are AdamW's.
    backward_passes_per_step: as DistributedOptimizer's.

    Used like AdamW: there is nothing to wrap. Options must be the same on every rank. During the warm-up backward returns with averaged
    gradients (``synchronize()`` does so under PSGC_LATE_SYNCHRONIZATION); later gradients, and so clipping, are each rank's own. A
    parameter without a gradient in a compressed step counts as zeros. Raises UsageError for a parameter whose first gradient comes after
    the warm-up; CodecError where a codec cannot carry a parameter.
    """

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, warmup_steps: int, codec: str = "onebit", warmup_codec: str = "none",
        decoupled_weight_decay: bool = True, backward_passes_per_step: int = 1,
    ) -> None:  # fmt: skip
        _check_count("OneBitAdam", "warmup_steps", warmup_steps)
        self._warmup_steps = warmup_steps
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay, codec, warmup_codec, backward_passes_per_step
        )  # fmt: skip

    def _averages_gradients(self, step: int) -> bool:
        return step < self._warmup_steps

    def _compressed_step(self) -> None:
        moving = self._moving()
        updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def outgoing(index: int) -> torch.Tensor:
            group, parameter = moving[index]
            updates[index] = self._own_update(parameter, group)
            return updates[index][0]

        self._average(moving, outgoing)
        for index, (update, denominator) in updates.items():
            group, parameter = moving[index]
            state = self.state[parameter]
            torch.mul(update, denominator, out=state["exp_avg"])
            if parameter.requires_grad:
                _decay(parameter, _kept(group))
                parameter.add_(update, alpha=-_step_size(state, group))


class ZeroOneAdam(FrozenVarianceAdam):
    """0/1 Adam (Lu et al. 2022): the variance freezes by and by, then ranks take local steps and meet ever more rarely.

    Until ``warmup_steps`` the variance is updated, from averaged gradients, in ``variance_updates`` steps in a row, then as often in
    every second step, then in every fourth, and so on; in between momenta travel compressed. From then on the variance is frozen and
    ranks take local steps: they meet in every step at first, and the interval doubles every ``local_growth`` steps up to
    ``max_local_steps``. What travels then is how far each rank has moved since, by its learning rates; the mean of it becomes the step
    that all take from where they last met, and the momentum. Its residual is in units of the parameters.

    Between two meetings the ranks' parameters differ: call ``synchronize_parameters()`` on all ranks before you validate or save them.
    The other arguments, and what happens to gradients, are OneBitAdam's. Where the paper's ranks exchange both, a step with averaged
    gradients needs no momenta here: these are the same on all ranks.
    """

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, warmup_steps: int, local_growth: int, max_local_steps: int = 16, variance_updates: int = 16,
        codec: str = "onebit", warmup_codec: str = "none", decoupled_weight_decay: bool = True, backward_passes_per_step: int = 1,
    ) -> None:  # fmt: skip
        counts = {
            "warmup_steps": warmup_steps, "local_growth": local_growth, "max_local_steps": max_local_steps,
            "variance_updates": variance_updates,
        }  # fmt: skip
        for name, value in counts.items():
            _check_count("ZeroOneAdam", name, value)
        self._warmup_steps, self._variance_updates = warmup_steps, variance_updates
        self._local_growth, self._max_local_steps = local_growth, max_local_steps
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay, codec, warmup_codec, backward_passes_per_step
        )  # fmt: skip

    def synchronize_parameters(self) -> None:
        """Average parameters and momenta now, so that all ranks hold the same. Every rank must call it between the same two steps."""
        with torch.no_grad():
            moving = self._moving()
            if any("anchor" in self.state[parameter] for _, parameter in moving):
                self._meet(moving, lambda index: self.state[moving[index][1]]["moved"])

    def residual_state_dict(self) -> dict[str, Any]:
        """As DistributedOptimizer's, and where the ranks' parameters and momenta differ, which ``state_dict()`` has of its own rank only."""
        apart = {
            self._name(parameter): {field: tensor.clone() for field, tensor in self._apart(parameter).items()}
            for parameter in self._moved()
        }
        return super().residual_state_dict() | {"apart": apart}

    @torch.no_grad()
    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As DistributedOptimizer's; after the model's and the optimizer's own ``load_state_dict()``, which must be of the same step."""
        moved = {self._name(parameter): parameter for parameter in self._moved()}
        apart = share_apart(states, self._session.rank, self._session.size, {name: self._apart(p) for name, p in moved.items()})
        super().load_residual_state_dict(states)
        for name, values in apart.items():
            for field, tensor in self._apart(moved[name]).items():
                tensor.copy_(values[field])

    def _moved(self) -> list[torch.Tensor]:
        """The parameters that have taken local steps since the ranks last exchanged."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if "anchor" in self.state.get(parameter, {})]

    def _apart(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        return {"parameter": parameter.detach(), "exp_avg": state["exp_avg"], "moved": state["moved"]}

    def _averages_gradients(self, step: int) -> bool:
        if step >= self._warmup_steps:
            return False
        # Stage e begins at step variance_updates * (2**e - 1) and has variance_updates updates, 2**e steps apart.
        interval = 1 << (step // self._variance_updates + 1).bit_length() - 1
        return (step - self._variance_updates * (interval - 1)) % interval == 0

    def _meets(self, step: int) -> bool:
        """Whether ranks exchange in this compressed step."""
        since = step - self._warmup_steps
        if since < 0:
            return True
        interval = min(1 << min(since // self._local_growth, 62), self._max_local_steps)
        return (since + 1) % interval == 0

    def _compressed_step(self) -> None:
        moving = self._moving()
        if self._meets(self.steps):
            self._meet(moving, lambda index: self._move(*moving[index], local=False))
        else:
            for group, parameter in moving:
                self._move(group, parameter, local=True)

    def _move(self, group: Options, parameter: torch.Tensor, *, local: bool) -> torch.Tensor:
        """Take this rank's local step and record it; returns how far the parameter has moved since ranks last met, without weight decay.

        State, between two meetings: ``anchor``, the parameter when ranks last met, ``moved``, ``rates``, the sum of its step sizes, and
        ``kept``, the product of what weight decay left. local: False: ranks are about to meet, the parameter itself need not move.
        """
        update, _ = self._own_update(parameter, group)
        state = self.state[parameter]
        if "anchor" not in state:
            state.update(anchor=parameter.clone(), moved=torch.zeros_like(update), rates=0.0, kept=1.0)
        size = _step_size(state, group)
        state["moved"].add_(update, alpha=size)
        state["rates"] += size
        state["kept"] *= _kept(group)
        if local and parameter.requires_grad:
            _decay(parameter, _kept(group))
            parameter.sub_(update, alpha=size)
        return state["moved"]  # type: ignore[no-any-return]

    def _meet(self, moving: list[tuple[Options, torch.Tensor]], moved: Callable[[int], torch.Tensor]) -> None:
        """Average how far ranks have moved, take that step from the anchors, and make the momenta of it."""
        self._average(moving, moved)
        for group, parameter in moving:
            state = self.state[parameter]
            if "anchor" not in state:  # it has no elements
                continue
            if state["rates"]:  # a learning rate of 0 moves nothing: the momentum waits for the next meeting
                torch.mul(state["moved"], _denominator(state, group) / state["rates"], out=state["exp_avg"])
            if parameter.requires_grad:
                parameter.copy_(_decay(state["anchor"], state["kept"]).sub_(state["moved"]))
            for name in ("anchor", "moved", "rates", "kept"):
                del state[name]


def _gradient(parameter: torch.Tensor, group: Options) -> torch.Tensor:
    """The gradient, with L2 where weight decay is not decoupled. Raises UsageError for a sparse one."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise UsageError("psgc carries dense gradients: use sparse=False in embedding layers")
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        return gradient.add(parameter, alpha=group["weight_decay"])
    return gradient


def _kept(group: Options) -> float:
    """The factor that one step of decoupled weight decay multiplies a parameter with."""
    return 1 - float(group["lr"]) * float(group["weight_decay"]) if group["decoupled_weight_decay"] else 1.0


def _decay(parameter: torch.Tensor, kept: float) -> torch.Tensor:
    return parameter if kept == 1.0 else parameter.mul_(kept)


def _denominator(state: State, group: Options) -> torch.Tensor:
    correction = 1 - group["betas"][1] ** state["variance_steps"]
    return (state["exp_avg_sq"].sqrt() / correction**0.5).add_(group["eps"])  # type: ignore[no-any-return]


def _step_size(state: State, group: Options) -> float:
    return float(group["lr"]) / (1 - float(group["betas"][0]) ** int(state["step"]))


def _check_count(optimizer: str, name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{optimizer}: {name} is {value!r}, expected a whole number of at least 1")
