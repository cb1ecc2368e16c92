"""What a program asks of the ranks that it runs on: groups, and the collectives of a group.

Owns the interface only; ``memory_groups.py`` implements it with threads of one process, as the reference, and ``psgc/torch/collectives``
with gloo. Knows NumPy arrays, not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = memoryview | NDArray[np.uint8]  # flat, contiguous, of single bytes; one that receives is writable


class Group(Protocol):
    """Some ranks of the job, which exchange arrays.

    Every member calls the same methods in the same order; each blocks until this rank's part is done. One thread at a time calls them.
    Arrays are NumPy, contiguous, flat and writable; ``dtype`` is psgc's name of the element type (bfloat16 arrays hold uint16 bits).
    Arrays of no elements are fine. All methods raise GroupError, or the error that ended the job.
    """

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the job, ascending."""

    @property
    def index(self) -> int:
        """This rank's place among the members."""

    def all_reduce(self, array: Array, dtype: str) -> None:
        """``array`` becomes the sum of all members' arrays, the same bits on each; integers wrap. The order of additions is the backend's."""

    def maximum(self, array: Array) -> None:
        """``array``, int32, becomes the element-wise maximum (the control word)."""

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        """The array of the member with index ``root`` becomes the sum; the others' contents are undefined afterwards."""

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        """``array`` becomes that of the member with index ``root``."""

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        """Member i's slice [cuts[i], cuts[i + 1]) of its array becomes the sum over members, over ``divisor``; the rest of its array is undefined.

        cuts: [members + 1] ascending from 0 to the array's elements; slices may be uneven or empty.
        Sums are taken in member order, left to right: 16-bit floats in float32, rounded once; other types in their own, but
        integers that are divided (by floor) in int64. So they do not depend on the backend.
        """

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        """Every slice [cuts[i], cuts[i + 1]) of ``array`` becomes that of member i."""

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        """Send ``outgoing[i]`` to member i and fill ``incoming[i]`` with what member i sends here; None, or no bytes: nothing.

        Both ends know the lengths. What a member sends to itself is copied.
        """


class DeviceGroup(Protocol):
    """Some ranks whose floats lie on GPUs of their own: collectives there, and no copy in the hosts' memory.

    As of ``Group``: every member calls the same methods in the same order, each blocks until this rank's part is done, and sums are in member order, here of
    all operations. op: a collective of floats by its name in ``Group``. All methods raise GroupError, or the error that ended the job.
    """

    def raw(self, device: object, lo: int, hi: int, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        """On elements [lo, hi) of a bucket (a ``psgc.worker.device.DeviceBucket``); cuts begin at 0."""

    def raw_array(self, array: Array, dtype: str, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        """On host memory, which is copied to this rank's GPU and back: for a rank whose floats have moved since the ranks agreed."""


class Groups(Protocol):
    """The groups of one rank."""

    def group(self, members: tuple[int, ...]) -> Group:
        """The group of these ranks, ascending, of which this rank is one. Made at first use, when all members must ask for it; then kept.
        Raises UsageError for members that cannot be a group, GroupError where the others cannot be reached."""

    def on_device(self, members: tuple[int, ...], device: object) -> DeviceGroup | None:
        """The same ranks' group on their GPUs; None, on all of them, where they cannot have one. Asked for by all members at the same point, as ``group`` is,
        each with a bucket that lies on its GPU. Raises ConfigError where one of them asks for what the group cannot have."""

    def close(self) -> None:
        """Leave all groups. Idempotent."""
