"""Adam for compressed communication: OneBitAdam and ZeroOneAdam. Gradients stay on their rank; the momenta travel.

Under plain Adam a coarse codec spoils the second moment, because error feedback sends spikes. These two optimizers avoid that: steps that
update the variance average whole gradients, as DistributedOptimizer does, and are Adam's own steps; in all other steps the variance is
frozen, every rank adds its own gradient to its momentum, and the momenta are averaged, compressed both ways under error feedback.

Two choices are ours. What travels is the *update*, momentum over the root of the frozen variance: for a frozen variance that is the
same algorithm in other coordinates, and a codec's scale then fits tensors whose gradients differ by orders of magnitude. And no element of
a rank's update exceeds what Adam itself could make, max(1, (1 - beta1) / sqrt(1 - beta2)) (Kingma & Ba 2015, section 2.1), times the root
of the number of ranks, for the variance is that of their mean: an element that was quiet while its variance froze could else jump by
any amount, and take its block's scale with it.

Owns what both share; ``onebit_adam`` and ``zero_one_adam`` have the schedules and the steps on own gradients. ``gradients/in_backward.py`` synchronizes whole
gradients, ``gradients/momenta.py`` the momenta.
Sources: Tang et al. 2021 (1-bit Adam), Algorithm 1; Lu et al. 2022 (0/1 Adam), Algorithm 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from psgc.errors import UsageError
from psgc.torch.auto.observing import observe
from psgc.torch.gradients.momenta import Momenta
from psgc.torch.optimizers.adam_step import Options, adam_step, check_options, own_update, take_over
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.wrapping import check_passes, pairs_of, parameter_spec, refuse_no_parameters
from psgc.torch.plans.choice import Choice, refuse_asynchronous, refuse_plan
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state.saved import MOMENTA
from psgc.torch.tensors.codec_text import check_carries, codec_text

Parameters = Iterable[Any]  # parameters, (name, parameter) pairs, or groups: dicts whose "params" holds either


class FrozenVarianceAdam(Distributed):
    """What both optimizers share; see the module's text.

    State of a parameter: as ``adam_step`` has it. Every group has ``steps``: steps taken so far, the same in all groups, which the schedule is a function of.
    """

    def __init__(
        self, params: Parameters, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled_weight_decay: bool,
        codec: str, warmup_codec: str, backward_passes_per_step: int,
    ) -> None:  # fmt: skip
        check_options(type(self).__name__, lr, betas, eps)
        check_passes(backward_passes_per_step)
        refuse_no_parameters(params, type(self).__name__)
        session = api.current_session()
        refuse_replaceable(session, "an optimizer that sends momenta")
        refuse_backup(session, "an optimizer that sends momenta")
        if session.config.async_mode:
            refuse_asynchronous(type(self).__name__)
        refuse_plan(session, type(self).__name__)
        carried = codec_text(codec, "float32")
        self._psgc_join(session, {}, Choice(codec_text(warmup_codec, "float32")), backward_passes_per_step)
        self._momenta = Momenta(session, self._psgc_gradients.exchange.name, carried)
        self._psgc_gradients.kinds[MOMENTA] = self._momenta.exchange
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "steps": 0}
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled_weight_decay})
        observe(self._psgc_gradients.exchange, self._psgc_names)
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
        pairs = pairs_of(param_group["params"], self._psgc_names.values(), len(self.param_groups), type(self).__name__)
        for name, parameter in pairs:
            if isinstance(parameter, torch.Tensor):  # torch refuses anything else
                for exchange in self._psgc_gradients.kinds.values():
                    check_carries(exchange.choice.codec, parameter, name)
                self._psgc_names[parameter] = name
        steps = self.steps if self.param_groups else 0
        super().add_param_group({**param_group, "params": [parameter for _, parameter in pairs], "steps": steps})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. The state of a torch Adam or AdamW is welcome, too: it goes on where that left off."""
        super().load_state_dict(state_dict)
        taken = max(map(take_over, self.state.values()), default=0)
        for group in self.param_groups:
            group.setdefault("steps", taken)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._follow_schedule()

    @torch.no_grad()
    @uncompiled
    def _psgc_apply(self, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        if self._averages_gradients(self.steps):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        adam_step(parameter, self.state[parameter], group)
        else:
            self._compressed_step()
        for group in self.param_groups:
            group["steps"] += 1
        self._follow_schedule()
        return loss

    def _follow_schedule(self) -> None:
        """Have the next backward's gradients averaged, or left alone."""
        self._psgc_gradients.paused = not self._averages_gradients(self.steps)

    def _moving(self) -> list[tuple[Options, torch.Tensor]]:
        """The parameters with a variance, each with its group. Raises UsageError for a gradient that came too late to have one."""
        moving = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    moving.append((group, parameter))
                elif parameter.grad is not None:
                    raise UsageError(
                        f"parameter {self._psgc_names[parameter]!r} has its first gradient in step {self.steps + 1}, "
                        f"when the variance is frozen; let it take part in the warm-up on some rank, or make the warm-up longer"
                    )
        return moving

    def _own_update(self, parameter: torch.Tensor, group: Options) -> tuple[torch.Tensor, torch.Tensor]:
        return own_update(parameter, self.state[parameter], group, self._momenta.session.size)

    def _average(self, moving: list[tuple[Options, torch.Tensor]], outgoing: Callable[[int], torch.Tensor]) -> None:
        """The compressed mean over all ranks of ``outgoing(i)``, one tensor for each of ``moving``, in place."""
        specs = tuple(parameter_spec(parameter, self._psgc_names[parameter]) for _, parameter in moving)
        self._momenta.average(specs, [parameter for _, parameter in moving], outgoing)

    def switch_plan(self, plan: Any) -> NoReturn:
        """Not possible here: raises UsageError."""
        raise UsageError(f"switch_plan: {type(self).__name__} sends momenta by a codec of its own, not by a plan; use DistributedOptimizer")
