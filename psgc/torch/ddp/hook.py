"""``ddp_hook``: models that torch's DistributedDataParallel (DDP) wraps, by the user or by a library, with psgc in place of the all-reduce.

Owns the hook that DDP calls, its registration and its checks; ``models`` has the models, and ``gradients`` synchronizes theirs. DDP still uses its process
group for everything but gradients: initial parameters, buffers, and which parameters were used.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from psgc.errors import UsageError
from psgc.plan.model.level import asks_auto
from psgc.plan.model.plan import Plan
from psgc.torch.ddp import amp, wrappers
from psgc.torch.ddp.completions import Arrival, Completion
from psgc.torch.ddp.models import SERVED, HookedModels, check_group, check_world
from psgc.torch.ddp.parameters import laid_out
from psgc.torch.gradients.last_step import NONE_WAIT
from psgc.torch.plans.choice import Given, chosen, switched
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.codec_text import codec_text

logger = logging.getLogger(__name__)


def ddp_hook(codec_or_plan: Given = None) -> DdpHook:
    """A communication hook with which DistributedDataParallel averages gradients through psgc. Joins the job if this process has not.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, psgc.ddp_hook("int8"))

    Where a library wraps the model, one line before it does: ``psgc.ddp_hook("int8").install()``.

    codec_or_plan: codec text (``"int8"``, ``"topk:k=0.01"``, ``"onebit/int8"``), or a plan or its file (``"plan.json"``), which must be of
                   exactly the model's parameters; None: PSGC_PLAN, else PSGC_CODEC, else uncompressed.
    Raises CodecError for an unknown codec; UsageError for a plan that cannot be run; ConfigError where torch.distributed's ranks, as the
    environment has them, are not those of psgc's job.
    """
    return DdpHook(codec_or_plan)


class DdpHook:
    """See ``ddp_hook``. One hook may serve several models."""

    # DDP and libraries look at these, as at a function's; DDP refuses annotations that it did not expect.
    __signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("state", "bucket")])

    def __init__(self, codec_or_plan: Given = None) -> None:
        self.__name__ = self.__qualname__ = "psgc.torch.ddp_hook"
        if isinstance(codec_or_plan, str) and not asks_auto(codec_or_plan) and not codec_or_plan.endswith(".json"):
            codec_text(codec_or_plan, "float32")  # a misspelt codec is told before the job is joined
        api.init()
        self._session = api.current_session()
        refuse_replaceable(self._session, "ddp_hook")
        refuse_backup(self._session, "ddp_hook")
        check_world(self._session)
        choice = chosen(self._session, codec_or_plan, "ddp_hook")
        if self._session.config.profile:
            raise UsageError("PSGC_PROFILE times DistributedOptimizer, not DDP; profile the script with the optimizer wrapped instead")
        amp.install()
        wrappers.watch()
        self._models = HookedModels(self._session, choice)

    def install(self) -> DdpHook:
        """Have every DistributedDataParallel that is constructed from now on in this process use this hook, in place of any installed
        before. Returns the hook."""
        before = [wrapper for wrapper in wrappers.all_wrappers() if wrapper not in SERVED]
        if before:
            logger.warning(
                "ddp_hook().install() comes after DistributedDataParallel has wrapped %s: its gradients do not go through psgc; install before",
                ", ".join(type(wrapper.module).__name__ for wrapper in before),
            )  # fmt: skip
        wrappers.do_with_new(self._register)
        return self

    def residual_state_dict(self) -> dict[str, Any]:
        """What codecs keep on this rank, and this rank's share of what they keep on the servers, of each model in the order of their first
        backwards, to be saved with torch.save: a file for each rank. Call it between two steps, on every rank. Raises UsageError while
        states of all ranks, loaded since, wait for a first step."""
        return self._models.state()

    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``residual_state_dict()``: this rank's own, or a list of all ranks' where the number of workers is another now. Call
        it on every rank, between two steps; before the first one, models take it up in the order of their first backwards. Raises
        UsageError for what does not fit."""
        self._models.load(states)

    def switch_plan(self, plan: str | os.PathLike[str] | Plan) -> None:
        """From the next step on, gradients of every model travel by this plan, its file (of which rank 0's is enough) or a codec's text; what codecs keep
        goes along. Call it on every rank between the same two steps: after step(), before the next backward(). Raises UsageError in the middle of
        a step and for a plan that cannot be run; CodecError. Where ``auto`` chose until now, it ends."""
        self._models.switch(switched(self._session, plan))

    def put_back(self, model: torch.nn.Module | None = None) -> None:
        """Put averaged gradients off, in place of the optimizer's step(): they go back into the residuals of codecs with error feedback, and come with later
        steps; p.grad is cleared. Without error feedback this is ``discard()``. Call it on every rank.

        model: whose gradients, DistributedDataParallel or what it wraps; None: of every model whose gradients wait for a step.
        Raises UsageError if none do."""
        waiting = [gradients for gradients in self._models.of(model, "put_back") if gradients.exchange.last.waits]
        if not waiting:
            raise UsageError(NONE_WAIT)
        for gradients in waiting:
            gradients.put_back()
            gradients.clear()

    def discard(self, model: torch.nn.Module | None = None) -> None:
        """Do without the averaged gradients in p.grad, in place of the optimizer's step(): the same as ``zero_grad()``. What codecs have not sent of them
        stays in the residuals, and comes with later steps. model: as of ``put_back``; None: every model."""
        for gradients in self._models.of(model, "discard"):
            gradients.clear()

    def statistics(self) -> dict[str, int]:
        """Counters: steps, and gradient_bytes that DDP has handed over, as they were in memory. ``current_session().statistics()`` has what
        travelled."""
        models = self._models.all
        return {"steps": sum(each.steps for each in models), "gradient_bytes": sum(each.gradient_bytes for each in models)}

    @uncompiled
    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls during backward. The future completes when the bucket's memory holds the mean over all ranks."""
        if isinstance(bucket, tuple):
            raise UsageError("psgc's hook needs DDP's own reducer; set torch._dynamo.config.optimize_ddp to \"ddp_optimizer\"")
        buffer, parameters = bucket.buffer(), bucket.parameters()
        averaged = self._models.reducing(parameters)
        if buffer.layout != torch.strided:
            raise UsageError(
                "DDP hands over a sparse gradient, which only DistributedOptimizer(sparse=...) and psgc.torch.DistributedDataParallel carry; use one "
                "of these, or sparse=False in the embedding"
            )
        completion = Completion(buffer)
        gradients = [laid_out(gradient, p) for gradient, p in zip(bucket.gradients(), parameters, strict=True)]
        averaged.take(Arrival(parameters, gradients, completion, bucket.is_last()))
        return completion.future

    def __deepcopy__(self, memo: object) -> DdpHook:
        """Itself, as of a function: copies of DDP models list their hooks, and average without them until they are registered there."""
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        """A hook belongs to its process and job: in what is saved, with a model, it has a name that tells so."""
        return _none_saved, ()

    def _register(self, wrapper: DistributedDataParallel) -> None:
        check_group(wrapper, self._session)
        if wrapper.mixed_precision is not None:
            raise UsageError("DistributedDataParallel(mixed_precision=...) has a hook of its own; use torch.autocast for mixed precision")
        wrapper.register_comm_hook(None, self)
        SERVED.add(wrapper)


def _none_saved() -> Callable[[object, object], NoReturn]:
    return saved_hook


def saved_hook(state: object, bucket: object) -> NoReturn:
    """In place of a hook that was saved with its model. Raises UsageError."""
    raise UsageError(
        "psgc's hook was not saved with its DistributedDataParallel; register psgc.torch.ddp_hook() on the one that was loaded"
    )
