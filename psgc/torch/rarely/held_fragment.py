"""A part of a model whose outer step servers take: they hold its outer parameters and their momentum, and give back what follows from all ranks' progress.

A rank keeps one copy beside its own parameters: the outer ones as it was last given them, from which its progress is measured, and in whose memory it
travels. ``fragment.py`` has the same with the outer step on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.rarely.fragment import check_outer, on_host, restore_own
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept, check_sizes
from psgc.torch.tensors.declaring import spec_of
from psgc.torch.tensors.held import HeldTensors, held_dtype, rounded
from psgc.torch.tensors.push_pull import push_pull_async_inplace, synchronize
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import Session


class _Moved(Mapping[str, torch.Tensor]):
    """How far each parameter has come from the outer one, computed when it is asked for: only one tensor's progress takes memory at a time."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], outer: Mapping[str, torch.Tensor]) -> None:
        self._parameters, self._outer = parameters, outer

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter, outer = self._parameters[name].detach(), self._outer[name]
        return torch.sub(parameter.to(outer.device, outer.dtype), rounded(outer, parameter.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._outer)

    def __len__(self) -> int:
        return len(self._outer)


class HeldFragment:
    """parameters: by name, of this rank; those of rank 0 are everyone's once it is made. rule: an outer step in rounds. codec: of what is pushed."""

    def __init__(self, session: Session, name: str, codec: str, parameters: Mapping[str, torch.Tensor], rule: str) -> None:
        self._session, self._name, self._codec, self._rule = session, name, codec, rule
        self.names, self._parameters = list(parameters), dict(parameters)
        self._loaded = 0  # how often a state was
        self._held = HeldTensors(
            {key: tensor.detach().to(held_dtype(tensor, key, "DiLoCo")) for key, tensor in parameters.items()}, name, rule, codec
        )
        self.under_way, self._here = False, False
        self._meeting: list[int] = []  # handles of the parameters' means
        self.follow(0.0)

    def leave(self) -> None:
        """Send how far the parameters have come."""
        self._held._psgc_push(_Moved(self._parameters, self._held.values))
        self.under_way, self._here = True, False

    def arrive(self) -> None:
        """Wait for the outer parameters, if they are under way; they are taken later."""
        if self.under_way and not self._here:
            self._held.take()
            self._here = True

    def take(self, mix: float) -> None:
        """Wait for the outer parameters, and go on from them, with ``mix`` times what this rank has beyond them."""
        self.arrive()
        self.follow(mix)
        self.under_way = self._here = False

    @torch.no_grad()
    def differs(self) -> bool:
        """Whether this rank's parameters are others than the outer ones."""
        outer = self._held.values
        each = self._parameters.items()
        return not all(torch.equal(parameter, outer[name].to(parameter.device, parameter.dtype)) for name, parameter in each)

    def share(self) -> None:
        """Send the parameters themselves, of which servers make the mean, and no outer step."""
        each = self._parameters.items()
        self._meeting = [push_pull_async_inplace(parameter.detach(), name=f"{self._name}.mean.{name}") for name, parameter in each]

    def meet(self) -> None:
        """After ``share``: wait for the means, which are the parameters from now on. The outer ones stay as they are."""
        for handle in self._meeting:
            synchronize(handle)
        self._meeting = []

    def state(self) -> dict[str, Any]:
        """The outer parameters by name, with what is under way, and this rank's own where they are others; what this rank's codec keeps, and of the servers'
        momentum what this rank answers for. Raises UsageError for momentum that cannot be saved."""
        wide = [name for name, tensor in self._held.values.items() if tensor.dtype == torch.float64]
        if wide and self._held.rule.keeps_momentum:
            raise UsageError(f'DiLoCo: {wide[0]!r} is float64, whose momentum on servers cannot be saved; make it with on="workers"')
        self.arrive()
        memory, session = self._held.remembered(), self._session
        draws = {"steps": memory.steps, "seed": memory.seed, "stream": memory.stream}
        return {
            "under_way": self.under_way,
            "outer": {name: tensor.detach().clone() for name, tensor in self._held.values.items()},
            "own": {name: on_host(parameter) for name, parameter in self._parameters.items()} if self.differs() else None,
            "held": saved.state_of(session, {saved.CHANGES: Kept(memory.tensors, memory.servers)}) | draws,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError for a state of other parameters, or of another rank."""
        check_outer(state["outer"], self._held.values)
        self._share_of(state)

    def _share_of(self, state: Mapping[str, Any]) -> Kept:
        session = self._session
        checked = saved.check_states(state["held"], session.rank, session.size, by="DiLoCo.load_state_dict")
        kept = saved.share_of(checked, saved.CHANGES, session.rank, session.size)
        check_sizes((spec_of(tensor, name, name) for name, tensor in self._held.values.items()), kept)
        return kept

    def go_on(self, state: Mapping[str, Any], own_numbers: bool) -> None:
        """From ``state()``, which has been checked. The servers hold new tensors from now on, and keep the memory of the former ones until the job ends. The
        rule's numbers are those that it was made with."""
        self.arrive()
        kept, held = self._share_of(state), state["held"]
        self._loaded += 1
        memory = LayoutMemory(
            dict(kept.tensors), dict(kept.servers), steps=max(int(held["steps"]) - 1, 0),  # the initial values travel once more
            seed=held.get("seed", -1), stream=held.get("stream", ""),  # not in states of earlier versions
        )  # fmt: skip
        self._held = HeldTensors(state["outer"], f"{self._name}.loaded{self._loaded}", self._rule, self._codec, memory=memory)
        self.under_way = self._here = state["under_way"]
        if "own" in state:  # not in those of earlier versions
            restore_own(self._parameters, self._held.values, state["own"])

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """Go on from the outer parameters, as of ``take``."""
        for name, parameter in self._parameters.items():
            now = self._held.values[name].to(parameter.device, parameter.dtype)
            parameter.copy_(torch.lerp(now, parameter, mix) if mix else now)
