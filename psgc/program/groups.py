"""The interface of groups of ranks, and of the collectives that programs run on them.

Owns the interface only; ``memory_groups.py`` implements it with threads of one process, as the reference, and ``psgc/torch/collectives``
and `worker/collectives` over shared memory and sockets. Knows NumPy arrays, not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = memoryview | NDArray[np.uint8]  # flat, contiguous, of single bytes; one that receives is writable


class Group(Protocol):
    """A group of ranks that exchange arrays.

    Every member calls the same methods in the same order; each blocks until this rank's part is done. One thread at a time calls them.
    Arrays are NumPy, contiguous, flat and writable; ``dtype`` is psgc's name of the element type (bfloat16 arrays hold uint16 bits).
    Arrays of no elements are fine. All methods raise GroupError, or the error that ended the job.
    """

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the job, ascending."""

    @property
    def index(self) -> int:
        """This rank's index among the members."""

    def all_reduce(self, array: Array, dtype: str) -> None:
        """Set ``array`` to the sum of all members' arrays, with the same bits on each member; integers wrap. The backend chooses the order of
        additions."""

    def maximum(self, array: Array) -> None:
        """Set ``array``, int32, to the element-wise maximum over the members (used for the control word)."""

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        """Set the array of the member with index ``root`` to the sum. The other members' arrays are undefined afterwards."""

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        """Set ``array`` to that of the member with index ``root``."""

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        """Set member i's slice [cuts[i], cuts[i + 1]) of its array to the sum over members, divided by ``divisor``; the rest of its array is undefined.

        cuts: [members + 1] ascending from 0 to the array's elements; slices may be uneven or empty.
        Sums are taken in member order, left to right: 16-bit floats in float32, rounded once; other types in their own type, except that
        integers that are divided (by floor) are summed in int64. So sums do not depend on the backend.
        """

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        """Set each slice [cuts[i], cuts[i + 1]) of ``array`` to that of member i."""

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        """Send ``outgoing[i]`` to member i, and fill ``incoming[i]`` with what member i sends to this rank; None or no bytes: nothing is sent.

        Both ends know the lengths. What a member sends to itself is copied.
        """


class DeviceGroup(Protocol):
    """A group of ranks whose floats and payloads lie on a separate GPU each. Its collectives run from GPU to GPU, without copies in the hosts' memory.

    As in ``Group``, every member calls the same methods in the same order, and each call blocks until this rank's part is done. The sums of all operations
    are in member order. op: the name of a collective of floats in ``Group``. All methods raise GroupError, or the error that ended the job.
    """

    def raw(self, device: object, lo: int, hi: int, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        """Run a collective on elements [lo, hi) of a bucket (a ``psgc.worker.device.DeviceBucket``); cuts begin at 0."""

    def raw_array(self, array: Array, dtype: str, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        """Run a collective on host memory, which is copied to this rank's GPU and back, for a rank whose floats have moved to the host since the ranks
        agreed on GPUs."""

    def exchange(
        self, device: object, place: tuple[int, ...], op: str, outgoing: Sequence[Sequence[tuple[Any, int]]], coming: Sequence[Sequence[int]],
        root: int = 0,
    ) -> list[list[Any]]:  # fmt: skip
        """Exchange payloads and return what has come, by member. Payloads travel in memory of their bounds, so that nothing waits for a length.

        device: of the bucket, as of ``raw``; place: tells apart what of its payloads is kept at the same time. outgoing: by member, payloads (a
        ``psgc.worker.device.DevicePayload``, or bytes on the host) and their bounds; coming: by member, bounds, none of this member itself. op:
        all_to_all or gather; all_gather or broadcast, where each member gets what is for this member itself, in a broadcast of ``root``."""


class Groups(Protocol):
    """Makes and keeps the groups that one rank belongs to."""

    def group(self, members: tuple[int, ...]) -> Group:
        """The group of these ranks, which are ascending and include this rank. It is made at the first use, for which all members must ask, and then kept.
        Raises UsageError for members that cannot be a group, GroupError if the other members cannot be reached."""

    def on_device(self, members: tuple[int, ...], device: object) -> DeviceGroup | None:
        """The group of the same ranks on their GPUs; None, on all members, if they cannot have one. As with ``group``, all members must ask for it at the
        same point, each with a bucket that lies on its GPU. Raises ConfigError if a member demands NCCL and the group cannot use it."""

    def close(self) -> None:
        """Leave all groups. Idempotent."""
