"""Parameters whose gradients all ranks average in every step already: who exchanges less of them besides saves nothing, and trains otherwise than it says."""

from __future__ import annotations

import torch

from psgc.errors import UsageError
from psgc.torch.ddp import wrappers
from psgc.torch.ddp.told import carrying
from psgc.worker.part_session import PartSession
from psgc.worker.session import Session


class Averaged:
    """parameters: of a model that ranks train by themselves, by name; by: who exchanges them, for errors. Raises UsageError as ``check`` does."""

    def __init__(self, parameters: dict[str, torch.Tensor], session: Session, by: str) -> None:
        self._parameters, self._session, self._by = parameters, session, by
        wrappers.watch()
        self.check()

    def check(self) -> None:
        """Raise UsageError where torch's DistributedDataParallel averages a gradient over all the ranks, or psgc does. Within a site, or a part of the ranks,
        somebody may."""
        if self._session.size == 1:
            return
        members = self._session.members if isinstance(self._session, PartSession) else range(self._session.size)
        for wrapper in wrappers.all_wrappers():
            reached = torch.distributed.get_process_group_ranks(wrapper.process_group)
            if set(members) <= set(reached):
                own = {id(parameter) for parameter in wrappers.reduced(wrapper).values()}
                self._refuse(
                    own, "torch's DistributedDataParallel", "leave the wrapper out, or give it the process_group of the ranks of a site"
                )
        for front in carrying(self._parameters.values()):
            own = {id(parameter) for parameter in self._parameters.values() if front.knows(parameter)}
            self._refuse(own, f"psgc ({front.exchange.name})", "leave its wrapper or hook out")

    def _refuse(self, averaged: set[int], who: str, mend: str) -> None:
        for name, parameter in self._parameters.items():
            if id(parameter) in averaged:
                raise UsageError(
                    f"{self._by}: {who} averages the gradient of {name!r} over all ranks in every step, so that {self._by} would save nothing: {mend}"
                )
