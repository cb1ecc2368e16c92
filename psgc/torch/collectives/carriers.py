"""What a carrier of groups is: one way by which the members of a group exchange arrays and payloads; and the table of them, in order of preference.

A carrier knows sockets, memory or a library; it knows no codecs, buckets and residuals. A group uses the first one that takes its members and what they
exchange.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from psgc.torch.collectives import device_group, sockets
from psgc.torch.collectives.memory import SharedMemory
from psgc.torch.device.engine import Engine
from psgc.worker.session import Session


class Carrier(Protocol):
    """One row of the table."""

    @property
    def name(self) -> str: ...

    @property
    def on_gpus(self) -> bool:
        """Whether it moves what lies on GPUs, one for each member, and its groups are ``DeviceGroup``s; else it moves what lies in hosts' memory, and its
        groups are ``Group``s (both in psgc.program.groups)."""

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        """Whether these members, of which this rank is one, can use it: the same answer on each of them, for which they may ask each other
        (``Session.publish`` and ``lookup``). name: unique among the groups of the job, for what they publish; engine: of the GPU that this rank's bucket lies
        on, if it moves what lies on GPUs. Raises ConfigError on every member where the settings ask for what cannot be."""

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> Any:
        """The group. Meets the other members, each of which calls this, too, in a thread that is given up if the job fails meanwhile. Its collectives begin
        when they are called and are over when they return; one that breaks raises by ``psgc.worker.collectives.breaking.fail``, which waits for the job's own
        error. Besides its protocol it has ``abort()``, which ends from any thread what is under way, and ``close()``, to leave the group while it is idle."""


CARRIERS: Final[tuple[Carrier, ...]] = (device_group.GpuToGpu(), SharedMemory(), sockets.Sockets())
