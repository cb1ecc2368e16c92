"""``ddp_hook``: models that torch's DistributedDataParallel (DDP) wraps, by the user or by a library, with psgc in place of the all-reduce.

Owns the hook that DDP calls, its registration and its checks; ``gradients`` synchronizes them. DDP still uses its process group for
everything but gradients: initial parameters, buffers, and which parameters were used.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from psgc.errors import ConfigError, UsageError
from psgc.plan.model.level import asks_auto
from psgc.plan.model.plan import Plan
from psgc.torch.ddp import amp, wrappers
from psgc.torch.ddp.completions import Completer, Completion
from psgc.torch.ddp.gradients import Arrival, DdpGradients
from psgc.torch.ddp.told import exchanges_of, watch_optimizers
from psgc.torch.gradients.linearity import CodecAdvice
from psgc.torch.plans.choice import Given, chosen, switched
from psgc.torch.session import api
from psgc.torch.tensors.codec_text import codec_text
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
START: Final = "start every worker of the script with `psgc run` or psgc-launch"
_served: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # wrappers that have a hook of psgc's
_numbers: weakref.WeakKeyDictionary[Session, Iterator[int]] = weakref.WeakKeyDictionary()


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
        _check_world(self._session)
        self._choice = chosen(self._session, codec_or_plan, "ddp_hook")
        if self._session.config.profile:
            raise UsageError("PSGC_PROFILE times DistributedOptimizer, not DDP; profile the script with the optimizer wrapped instead")
        self._advice: weakref.WeakKeyDictionary[torch.optim.Optimizer, CodecAdvice] = weakref.WeakKeyDictionary()
        self._advises = False
        self._look_out()
        amp.install()
        wrappers.watch()
        self._completer = Completer(self._session)
        self._models: list[DdpGradients] = []
        self._found: dict[int, DdpGradients] = {}  # by the id of a bucket's first parameter, while no other model is wrapped
        self._made = 0
        self._loaded: list[list[Mapping[str, Any]]] = []  # states of models that have not come yet, each of one rank or of all
        self._lock = threading.Lock()  # models on two devices may run backward in two threads

    def install(self) -> DdpHook:
        """Have every DistributedDataParallel that is constructed from now on in this process use this hook, in place of any installed
        before. Returns the hook."""
        before = [wrapper for wrapper in wrappers.all_wrappers() if wrapper not in _served]
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
        if any(len(of_ranks) > 1 for of_ranks in self._loaded):
            raise UsageError(
                "residual_state_dict: all ranks' states were loaded, and no step has taken them up yet; save after the first step"
            )
        return {"models": [*(gradients.state() for gradients in self._models), *(own for (own,) in self._loaded)]}

    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``residual_state_dict()``: this rank's own, or a list of all ranks' where the number of workers is another now. Call
        it on every rank, between two steps; before the first one, models take it up in the order of their first backwards. Raises
        UsageError for what does not fit."""
        given = [states] if isinstance(states, Mapping) else list(states)
        if not given or any(not isinstance(state, Mapping) or "models" not in state for state in given):
            raise UsageError(
                "load_residual_state_dict: expected what a hook's residual_state_dict() returned, of this rank or a list of all"
            )
        numbers = sorted({len(state["models"]) for state in given})
        if len(numbers) > 1:
            raise UsageError(
                f"load_residual_state_dict: the ranks' states are of {' and '.join(map(str, numbers))} models; are they of one job?"
            )
        self._loaded = [list(of_model) for of_model in zip(*(state["models"] for state in given), strict=True)]
        for gradients in self._models:
            self._go_on(gradients)

    def _go_on(self, gradients: DdpGradients) -> None:
        """Take up what was loaded for the model that is next."""
        if self._loaded:
            gradients.go_on(self._loaded.pop(0))

    def switch_plan(self, plan: str | os.PathLike[str] | Plan) -> None:
        """From the next step on, gradients of every model travel by this plan, its file (of which rank 0's is enough) or a codec's text; what codecs keep
        goes along. Call it on every rank between the same two steps: after step(), before the next backward(). Raises UsageError in the middle of
        a step and for a plan that cannot be run; CodecError. Where ``auto`` chose until now, it ends."""
        choice = switched(self._session, plan)
        for gradients in self._models:
            gradients.switch(choice)
        self._choice = choice
        self._advice.clear()
        self._look_out()

    def put_back(self, model: torch.nn.Module | None = None) -> None:
        """Put averaged gradients off, in place of the optimizer's step(): they go back into the residuals of codecs with error feedback, and come with later
        steps; p.grad is cleared. Without error feedback this is ``discard()``. Call it on every rank.

        model: whose gradients, DistributedDataParallel or what it wraps; None: of every model whose gradients wait for a step.
        Raises UsageError if none do."""
        waiting = [gradients for gradients in self._of(model, "put_back") if gradients.exchange.last.waits]
        if not waiting:
            raise UsageError(
                "put_back(): no averaged gradients wait for step(); call it in place of step(), after backward(), on every rank"
            )
        for gradients in waiting:
            gradients.put_back()

    def discard(self, model: torch.nn.Module | None = None) -> None:
        """Do without the averaged gradients in p.grad, in place of the optimizer's step(): the same as ``zero_grad()``. What codecs have not sent of them
        stays in the residuals, and comes with later steps. model: as of ``put_back``; None: every model."""
        for gradients in self._of(model, "discard"):
            gradients.clear()

    def _of(self, model: torch.nn.Module | None, by: str) -> list[DdpGradients]:
        """The gradients of the model's parameters. Raises UsageError for a model whose gradients this hook does not average."""
        if model is None:
            return self._models
        found = [gradients for gradients in self._models if any(map(gradients.knows, model.parameters()))]
        if not found:
            raise UsageError(
                f"{by}(): this hook has averaged no gradients of the {type(model).__name__}; give it the hook's model, after backward()"
            )
        return found

    def _look_out(self) -> None:
        """Watch for optimizers, whose steps count, and which a coarse codec may not suit."""
        watch_optimizers()
        if not self._advises:
            self._advises = True
            register_optimizer_step_post_hook(self._advise)

    def statistics(self) -> dict[str, int]:
        """Counters: steps, and gradient_bytes that DDP has handed over, as they were in memory. ``current_session().statistics()`` has what
        travelled."""
        return {
            "steps": sum(gradients.steps for gradients in self._models),
            "gradient_bytes": sum(gradients.gradient_bytes for gradients in self._models),
        }

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls during backward. The future completes when the bucket's memory holds the mean over all ranks."""
        if isinstance(bucket, tuple):
            raise UsageError("psgc's hook needs DDP's own reducer; set torch._dynamo.config.optimize_ddp to \"ddp_optimizer\"")
        buffer, parameters = bucket.buffer(), bucket.parameters()
        averaged = self._model_of(parameters)
        if buffer.layout != torch.strided:
            raise UsageError("DDP hands over a sparse gradient; psgc carries dense gradients: use sparse=False in the embedding")
        completion = Completion(buffer)
        gradients = [laid_out(gradient, p) for gradient, p in zip(bucket.gradients(), parameters, strict=True)]
        averaged.take(Arrival(parameters, gradients, completion, bucket.is_last()))
        return completion.future

    def _advise(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        """Called after any optimizer's step: the only place where the optimizers of DDP's parameters are seen."""
        mine = [gradients for gradients in self._models if gradients in exchanges_of(optimizer)]
        if mine:
            layouts = [layout for gradients in mine for layout in gradients.exchange.layouts]
            self._advice.setdefault(optimizer, CodecAdvice()).look(optimizer, layouts)

    def _register(self, wrapper: DistributedDataParallel) -> None:
        _check_group(wrapper, self._session)
        if wrapper.mixed_precision is not None:
            raise UsageError("DistributedDataParallel(mixed_precision=...) has a hook of its own; use torch.autocast for mixed precision")
        wrapper.register_comm_hook(None, self)
        _served.add(wrapper)

    def _model_of(self, parameters: Sequence[torch.Tensor]) -> DdpGradients:
        with self._lock:
            if self._made != wrappers.made():  # a model may have been wrapped again, with other parameters
                self._made = wrappers.made()
                self._found.clear()
            found = self._found.get(id(parameters[0]))
            if found is None:
                found = self._found[id(parameters[0])] = self._find(parameters)
            return found

    def _find(self, parameters: Sequence[torch.Tensor]) -> DdpGradients:
        wrapper = wrappers.wrapper_of(parameters)
        if wrapper is None:
            raise UsageError("psgc's hook was called for parameters that no DistributedDataParallel reduces; register it on the wrapper")
        _check_group(wrapper, self._session)
        _served.add(wrapper)
        if getattr(wrapper, "skip_all_reduce_unused_params", False):
            raise UsageError("psgc needs all of DDP's buckets in every step: leave skip_all_reduce_unused_params out")
        names = {p: name.replace("_orig_mod.", "") for name, p in wrappers.reduced(wrapper).items()}  # torch.compile puts it there
        for gradients in self._models:
            if gradients.parameters.are(names):
                return gradients
        self._choice.check(names)
        number = next(_numbers.setdefault(self._session, itertools.count()))
        gradients = DdpGradients(self._session, number, self._choice, names, self._completer)
        if self._choice.auto:
            from psgc.torch.gradients.auto import AutoPlan  # which loads the planner

            gradients.exchange.observer = AutoPlan(gradients.exchange, parameters[0])
        self._models.append(gradients)
        self._go_on(gradients)
        return gradients


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient's elements in the parameter's order. DDP keeps those of a dense parameter in its order in memory, whatever that is
    (channels_last), but shows them as if they were contiguous."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a contiguous range of memory, each element once."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _check_world(session: Session) -> None:
    """Raise ConfigError if torch.distributed's number of processes differs from psgc's."""
    world = session.config.world_size
    if world and world != session.size:
        remedy = START if session.size == 1 else "where nodes differ in size, set PSGC_NODE_SIZES on every machine"
        raise ConfigError(
            f"WORLD_SIZE={world}, but psgc's job has {session.size} worker(s), of which this is rank {session.rank}; {remedy}"
        )


def _check_group(wrapper: DistributedDataParallel, session: Session) -> None:
    """Raise UsageError unless DDP averages over the workers of the job."""
    size = wrapper.process_group.size()
    if size != session.size:
        raise UsageError(
            f"DistributedDataParallel averages over {size} process(es), but psgc's job has {session.size} worker(s); psgc averages over the "
            f"whole job: {START}, and leave process_group and device_mesh out"
        )
