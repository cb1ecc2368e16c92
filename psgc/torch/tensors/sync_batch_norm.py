"""Batch normalisation by the statistics of all ranks' batches together, as Horovod's and torch's ``SyncBatchNorm``.

Every rank sums what it has about its own mean, and a push_pull adds up these sums in double precision, so that little is lost where a mean is large beside its
deviation. push_pull is differentiable, and so the gradients are those of the sum of all ranks' losses, as torch's are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from psgc.torch.session import api
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.push_pull import push_pull
from psgc.worker.session import Session

# In the step under way, by name; of sessions for which ``number_forwards`` was called.
_forwards: WeakKeyDictionary[Session, Counter[str]] = WeakKeyDictionary()


def name_by_place(model: nn.Module) -> None:
    """Have the model's layers named by where they are in it, also in a process that joins when others have run some of them for the first time."""
    for place, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            module._psgc_name = f"SyncBatchNorm.model.{place}"


def number_forwards(session: Session) -> None:
    """A step begins, in which each forward of a layer has a name of its own: servers keep the last result of a name alone, and a process that takes a dead
    worker's place in the step needs them all."""
    _forwards[session] = Counter()


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """See the module's text. Takes inputs [N, C, ...] of any device; the options are torch.nn.SyncBatchNorm's. Every rank runs the same layers in the same
    order, also one whose batch is empty. In evaluation, or alone, it is torch's BatchNorm.

        model = psgc.SyncBatchNorm.convert_sync_batchnorm(model)      # before optimizers are made
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._psgc_name = ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # Other ranks may not evaluate when this one does, also where that is by the batch's own statistics.
        if not self.training or api.current_session().size == 1:
            return super().forward(input)
        mean, variance, count = self._statistics(input)
        if self.track_running_stats:
            self._follow(mean.detach(), variance.detach(), count)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (input.to(scale.dtype) * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _statistics(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and variance [C] in float32 or double, of all ranks' batches together, and the number of elements of a channel."""
        dims = [0, *range(2, given.dim())]
        own = given.numel() // given.shape[1]
        wide = given if given.dtype == torch.float64 else given.float()
        if own:
            variance, mean = torch.var_mean(wide, dims, correction=0)
            sums = torch.cat(
                [mean.double() * own, (variance.double() + mean.double().square()) * own, mean.new_tensor([own], dtype=torch.float64)]
            )
        else:
            sums = torch.cat(
                [wide.double().sum(dims)] * 2 + [wide.new_zeros(1, dtype=torch.float64)]
            )  # keeps the graph, so that backward takes part
        total = push_pull(sums, average=False, name=self._name())
        channels = given.shape[1]
        first, second, count = total[:channels], total[channels:-1], total[-1:]
        mean = first / count
        return mean.to(wide.dtype), (second / count - mean.square()).clamp_min(0).to(wide.dtype), count.detach()

    @uncompiled
    def _name(self) -> str:
        """By the number of layers that have run before for the first time: the same on all ranks that begin together."""
        session = api.current_session()
        if not self._psgc_name:
            self._psgc_name = f"SyncBatchNorm.{api.next_number(session, 'SyncBatchNorm')}"
        forwards = _forwards.get(session)
        if forwards is None:
            return self._psgc_name
        forwards[self._psgc_name] += 1  # by name: a copy of a layer has the layer's
        number = forwards[self._psgc_name]
        return self._psgc_name if number == 1 else f"{self._psgc_name}@{number}"

    @uncompiled  # the count, which is all ranks', is a number there
    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, of: torch.Tensor) -> None:
        """Update the running statistics, the variance's without bias. As in torch, any of them may have been set to None."""
        batches, count = 0.0, float(of)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            batches = float(self.num_batches_tracked) if self.momentum is None else 0.0
        if self.running_mean is None or self.running_var is None:
            return
        share = (1.0 / batches if batches else 0.0) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / max(1.0, count - 1))).to(self.running_var.dtype), share)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        """The module, with each BatchNorm in it replaced by a SyncBatchNorm that has its parameters and statistics."""
        made = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            made = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            if module.affine:
                made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var, made.num_batches_tracked = (
                module.running_mean,
                module.running_var,
                module.num_batches_tracked,
            )
            made.training = module.training
        for name, child in module.named_children():
            made.add_module(name, cls.convert_sync_batchnorm(child))
        return made
