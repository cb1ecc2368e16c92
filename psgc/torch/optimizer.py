"""``DistributedOptimizer``: wrap the optimizer, and ``step()`` uses the job's mean gradient. Names and semantics as BytePS's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from psgc.codecs import parse_pair
from psgc.errors import UsageError
from psgc.torch.amp import wrap_grad_scaler
from psgc.torch.api import current_session
from psgc.torch.synchronizer import Synchronizer

logger = logging.getLogger(__name__)

ADAPTIVE: Final = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "SparseAdam")
COARSE: Final = ("onebit", "topk")


class _Distributed(torch.optim.Optimizer):
    """Methods that DistributedOptimizer lays over the user's optimizer class."""

    _psgc: Synchronizer
    _psgc_base: type[torch.optim.Optimizer]
    _psgc_names: dict[torch.nn.Parameter, str]

    def step(self, closure: Any = None) -> Any:
        """Aggregate what is not aggregated yet, then step. A closure is run first, with gradients enabled; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._psgc.skip_next:
            self._psgc.watch(_named_of(self))
            self._psgc.synchronize()
        result = self._psgc_base.step(self)
        self._psgc.applied()
        return loss if closure is not None else result

    def synchronize(self) -> None:
        """Wait until every p.grad holds the job's mean. For clipping before ``step()``, which then does not push again."""
        self._psgc.watch(_named_of(self))
        self._psgc.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside does not synchronize: after an explicit ``synchronize()``, as in BytePS."""
        self._psgc.skip_next = True
        try:
            yield
        finally:
            self._psgc.skip_next = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are summed on this rank before its gradients are sent."""
        self._psgc.passes = _checked_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's. Raises UsageError between backward and step, where it would destroy what is being sent."""
        if self._psgc.under_way:
            raise UsageError(
                "zero_grad() between backward() and step(): gradients are being sent; call it before backward() or after step()"
            )
        self._psgc_base.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; the new parameters are laid out at the next synchronize."""
        self._psgc_base.add_param_group(self, param_group)
        if hasattr(self, "_psgc"):
            self._psgc.watch(_named_of(self))


def DistributedOptimizer(  # noqa: N802 - the name that BytePS and Horovod gave it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | None = None,
    backward_passes_per_step: int = 1,
) -> Any:
    """Make ``optimizer`` use the mean of all ranks' gradients; returns the same object, still an instance of its class.

    Gradients are sent as backward makes them (from the second step on: the first step settles the order). Those of several passes
    (``backward_passes_per_step``) are summed, not averaged, on this rank. compression: a codec's text form, e.g. "int8" or
    "onebit/int8"; default PSGC_CODEC. Parameters without a gradient on this rank are skipped or sent as zeros, and still get the mean.
    Raises UsageError for what cannot be meant: LBFGS, names that do not fit, an optimizer wrapped twice.
    """
    session = current_session()
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates its closure many times a step, which cannot be aggregated; use another optimizer")
    if hasattr(optimizer, "_psgc"):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if "step" in vars(optimizer):
        raise UsageError(
            "the optimizer's step was replaced (by a learning-rate scheduler?): wrap the optimizer first, then make the scheduler"
        )
    codec = parse_pair(compression or session.config.codec).canonical
    names = _names(optimizer, named_parameters)
    synchronizer = Synchronizer(session, codec, _checked_passes(backward_passes_per_step), optimizer.param_groups)
    base = type(optimizer)
    overlay = {name: value for name, value in vars(_Distributed).items() if not name.startswith("__")}
    distributed: Any = optimizer
    distributed.__class__ = type(base.__name__, (base,), overlay)
    distributed._psgc, distributed._psgc_base, distributed._psgc_names = synchronizer, base, names
    synchronizer.watch(_named_of(distributed))
    wrap_grad_scaler()
    _advise(base, codec)
    return distributed


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    known = [name for name, _ in pairs]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice:
        raise UsageError(f"named_parameters: the name {twice[0]!r} is given twice; names must be unique")
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise UsageError(
            f"named_parameters: {unnamed} parameter(s) of the optimizer have no name; pass model.named_parameters(), or nothing"
        )
    return names


def _named_of(optimizer: Any) -> list[tuple[str, torch.nn.Parameter, int]]:
    """(name, parameter, group) of all parameters, in the optimizer's order."""
    names = optimizer._psgc_names
    return [
        (names.get(parameter, f"param.{number}.{index}"), parameter, number)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: expected at least 1")
    return passes


def _advise(kind: type[torch.optim.Optimizer], codec: str) -> None:
    if kind.__name__ in ADAPTIVE and any(part.partition(":")[0] in COARSE for part in codec.split("/")):
        logger.warning(
            "%s with codec %s: error feedback is sound for SGD with momentum; adaptive optimizers lose quality under 1-bit and top-k "
            "(use bf16 or int8, or SGD)",
            kind.__name__,
            codec,
        )
