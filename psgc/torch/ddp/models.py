"""The models whose gradients one hook averages, and the states that wait for models which have not come yet.

A model is found by the parameters of DDP's buckets, in the first backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from psgc.errors import ConfigError, UsageError
from psgc.torch.auto.observing import observe
from psgc.torch.ddp import wrappers
from psgc.torch.ddp.completions import Completer
from psgc.torch.ddp.gradients import DdpGradients
from psgc.torch.gradients.linearity import CodecAdvice
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.tensors.declaring import plain_name
from psgc.worker.part_session import PartSession
from psgc.worker.session import Session

START: Final = "start every worker of the script with `psgc run` or psgc-launch"
SERVED: Final[weakref.WeakSet[DistributedDataParallel]] = weakref.WeakSet()  # wrappers that have a hook of psgc's


class HookedModels:
    """all: in the order of their first backwards. choice: what gradients of models that come travel by."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self.session, self.choice = session, choice
        self.all: list[DdpGradients] = []
        self._completer = Completer(session)
        self._found: dict[int, DdpGradients] = {}  # by the id of a bucket's first parameter, while no other model is wrapped
        self._made = 0
        self._advice = CodecAdvice()
        self._loaded: list[list[Mapping[str, Any]]] = []  # states of models that have not come yet, each of one rank or of all
        self._lock = threading.Lock()  # models on two devices may run backward in two threads

    def of(self, model: torch.nn.Module | None, by: str) -> list[DdpGradients]:
        """The gradients of the model's parameters. Raises UsageError for a model whose gradients this hook does not average."""
        if model is None:
            return self.all
        found = [gradients for gradients in self.all if any(map(gradients.knows, model.parameters()))]
        if not found:
            raise UsageError(
                f"{by}(): this hook has averaged no gradients of the {type(model).__name__}; give it the hook's model, after backward()"
            )
        return found

    def reducing(self, parameters: Sequence[torch.Tensor]) -> DdpGradients:
        """Of the model whose bucket of DDP's has these parameters. Raises UsageError where psgc cannot average it."""
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
        check_group(wrapper, self.session)
        SERVED.add(wrapper)
        if getattr(wrapper, "skip_all_reduce_unused_params", False):
            raise UsageError("psgc needs all of DDP's buckets in every step: leave skip_all_reduce_unused_params out")
        names = {p: plain_name(name) for name, p in wrappers.reduced(wrapper).items()}
        for gradients in self.all:
            if gradients.parameters.are(names):
                return gradients
        self.choice.check(names)
        gradients = DdpGradients(self.session, api.next_number(self.session, "ddp"), self.choice, names, self._completer)
        gradients.advice = self._advice
        observe(gradients.exchange, parameters)
        self.all.append(gradients)
        self._take_up(gradients)
        return gradients

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients of every model travel by this choice. Raises UsageError in the middle of a step."""
        for gradients in self.all:
            gradients.switch(choice)
        self.choice = choice

    def state(self) -> dict[str, Any]:
        """What codecs keep of each model's gradients. Raises UsageError while states of all ranks wait for a first step."""
        if any(len(of_ranks) > 1 for of_ranks in self._loaded):
            raise UsageError(
                "residual_state_dict: all ranks' states were loaded, and no step has taken them up yet; save after the first step"
            )
        return {"models": [*(gradients.state() for gradients in self.all), *(own for (own,) in self._loaded)]}

    def load(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``state()`` of this rank, or of all ranks: now, or with a model's first step."""
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
        for gradients in self.all:
            self._take_up(gradients)

    def _take_up(self, gradients: DdpGradients) -> None:
        """What was loaded for the model that is next."""
        if self._loaded:
            gradients.go_on(self._loaded.pop(0))


def check_group(wrapper: DistributedDataParallel, session: Session) -> None:
    """Raise UsageError unless DDP averages over the workers of the job."""
    group = wrapper.process_group
    size = group.size()
    if isinstance(session, PartSession) and sorted(dist.get_process_group_ranks(group)) != list(session.members):
        raise UsageError(
            f"DistributedDataParallel averages over ranks {dist.get_process_group_ranks(group)}, but psgc was initialized for ranks {list(session.members)} of "
            f"the mesh; give it process_group=mesh.get_group(dim)"
        )
    if size != session.size:
        raise UsageError(
            f"DistributedDataParallel averages over {size} process(es), but psgc's job has {session.size} worker(s); psgc averages over the "
            f"whole job: {START}, and leave process_group and device_mesh out, or name a mesh's dimension by psgc.torch.init(mesh=mesh, dim=...) first"
        )


def check_world(session: Session) -> None:
    """Raise ConfigError if torch.distributed's number of processes differs from psgc's."""
    world = session.config.world_size
    job = session.whole
    if world and world != job.size:
        remedy = START if job.size == 1 else "where nodes differ in size, set PSGC_NODE_SIZES on every machine"
        raise ConfigError(f"WORLD_SIZE={world}, but psgc's job has {job.size} worker(s), of which this is rank {job.rank}; {remedy}")
