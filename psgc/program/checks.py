"""Checks of collectives' arguments: element types, arrays, cuts, members. All backends use them, so they refuse the same calls with the same message."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.program.groups import Bytes

Array = NDArray[Any]
Members = tuple[int, ...]

# psgc's name of an element type: the NumPy type of its array. bfloat16, which NumPy lacks, is its bits.
DTYPES: Final[dict[str, Any]] = {
    "float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "float64": np.float64,
    "uint8": np.uint8, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "bool": np.bool_,
}  # fmt: skip


def check_array(array: Array, dtype: str) -> None:
    """Raise UsageError unless ``array`` is a flat, contiguous, writable NumPy array for elements of ``dtype``."""
    wanted = DTYPES.get(dtype)
    if wanted is None:
        raise UsageError(f"unknown element type {dtype!r}; choose one of {', '.join(DTYPES)}")
    if array.dtype != wanted or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise UsageError(
            f"a collective of {dtype} takes a flat, contiguous, writable array of {np.dtype(wanted)}, got {array.dtype}{list(array.shape)}"
        )


def check_cuts(cuts: Sequence[int], members: int, numel: int) -> None:
    """Raise UsageError unless ``cuts`` divide ``numel`` elements among the members."""
    ascending = all(a <= b for a, b in zip(cuts, list(cuts)[1:], strict=False))
    if len(cuts) != members + 1 or cuts[0] != 0 or cuts[-1] != numel or not ascending:
        raise UsageError(
            f"cuts {list(cuts)} do not divide {numel} elements among {members} members: members + 1, ascending from 0 to {numel}"
        )


def check_root(root: int, members: int) -> None:
    """Raise UsageError unless ``root`` is the index of a member."""
    if not 0 <= root < members:
        raise UsageError(f"root {root} is none of the {members} members: it is a member's index, from 0")


def take_turn(issuing: Lock, group: object, what: str) -> None:
    """Take the lock of a group whose collectives one thread at a time issues. Raises UsageError if another thread has it."""
    if not issuing.acquire(blocking=False):
        raise UsageError(
            f"{group}: {what} while another thread's collective is under way; one thread at a time issues a group's collectives"
        )


def check_members(members: Members, rank: int, size: int) -> None:
    """Raise UsageError unless ``members`` are ranks of a job of ``size`` workers, ascending, and ``rank`` is among them."""
    if not members or list(members) != sorted(set(members)) or rank not in members or members[0] < 0 or members[-1] >= size:
        raise UsageError(f"members {list(members)} are no group for rank {rank}: ranks below {size}, ascending, this one among them")


def check_payloads(outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None], members: int) -> None:
    """Raise UsageError unless an exchange has one entry, bytes or None, for each member."""
    if len(outgoing) != members or len(incoming) != members:
        raise UsageError(
            f"an exchange among {members} members got {len(outgoing)} to send and {len(incoming)} to receive; give one a member"
        )
