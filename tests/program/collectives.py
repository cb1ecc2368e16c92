"""Every collective of a group, held against NumPy: for threads of one process and for real processes alike."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.program.checks import DTYPES
from psgc.program.groups import Group, Groups
from psgc.program.sums import narrow_bf16, sum_in_order

SIZES = (0, 1, 7, 64, 4097)


def drawn(rank: int, numel: int, dtype: str, what: str) -> NDArray[Any]:
    """What a rank contributes, the same to whoever asks. Whole numbers whose sums fit every type, so that no order of additions matters."""
    numbers = np.random.default_rng([rank, numel, zlib.crc32(f"{dtype} {what}".encode())])
    if dtype == "bool":
        return numbers.integers(0, 2, numel).astype(np.bool_)
    values = numbers.integers(0 if dtype == "uint8" else -16, 16, numel)
    return narrow_bf16(values.astype(np.float32)) if dtype == "bfloat16" else values.astype(DTYPES[dtype])


def fractions(rank: int, numel: int, dtype: str) -> NDArray[Any]:
    """A contribution whose sum depends on the order of additions."""
    values = (np.random.default_rng([rank, numel]).standard_normal(numel) * 10.0 ** (np.arange(numel) % 5)).astype(np.float32)
    return narrow_bf16(values) if dtype == "bfloat16" else values.astype(DTYPES[dtype])


def uneven(numel: int, members: int, empty: int) -> list[int]:
    """Cuts that divide ``numel`` elements unevenly; member ``empty`` gets none."""
    weights = [0 if index == empty and members > 1 else 2 * index + 1 for index in range(members)]
    return [numel * sum(weights[:index]) // sum(weights) for index in range(members + 1)]


def check_every_method(groups: Groups, members: tuple[int, ...], dtypes: tuple[str, ...] = tuple(DTYPES)) -> None:
    """Call every method with every size; AssertionError names the first array that is not what NumPy makes."""
    group = groups.group(members)
    assert groups.group(members) is group, "a group is made once"
    assert group.members == members
    for dtype in dtypes:
        for numel in SIZES:
            _check_sums(group, numel, dtype)
            for empty in range(len(members)):
                _check_slices(group, numel, dtype, uneven(numel, len(members), empty))
    _check_maximum(group)
    for round_ in range(3):
        _check_exchange(group, round_)


def _own(group: Group) -> int:
    return group.members[group.index]


def _equal(group: Group, got: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    assert got.tobytes() == wanted.tobytes(), f"{what} on rank {_own(group)} of {group.members}: got {got[:8]}, expected {wanted[:8]}"


def _check_sums(group: Group, numel: int, dtype: str) -> None:
    wanted = sum_in_order([drawn(rank, numel, dtype, "sums") for rank in group.members], dtype)
    array = drawn(_own(group), numel, dtype, "sums")
    group.all_reduce(array, dtype)
    _equal(group, array, wanted, f"all_reduce of {numel} {dtype}")
    for root in range(len(group.members)):
        array = drawn(_own(group), numel, dtype, "sums")
        group.reduce(array, dtype, root)
        if root == group.index:
            _equal(group, array, wanted, f"reduce of {numel} {dtype}")
        array = drawn(_own(group), numel, dtype, f"broadcast {root}")
        group.broadcast(array, dtype, root)
        _equal(group, array, drawn(group.members[root], numel, dtype, f"broadcast {root}"), f"broadcast of {numel} {dtype}")


def _check_slices(group: Group, numel: int, dtype: str, cuts: list[int]) -> None:
    draw = fractions if dtype.startswith(("float", "bfloat")) else lambda rank, numel, dtype: drawn(rank, numel, dtype, "slices")
    wanted = sum_in_order([draw(rank, numel, dtype) for rank in group.members], dtype)
    array = draw(_own(group), numel, dtype)
    group.reduce_scatter(array, dtype, cuts)
    own = slice(cuts[group.index], cuts[group.index + 1])
    _equal(group, array[own], wanted[own], f"reduce_scatter of {numel} {dtype} by {cuts}")
    group.all_gather(array, dtype, cuts)
    _equal(group, array, wanted, f"all_gather of {numel} {dtype} by {cuts}")
    wanted = sum_in_order([draw(rank, numel, dtype) for rank in group.members], dtype, divisor=3)
    array = draw(_own(group), numel, dtype)
    group.reduce_scatter(array, dtype, cuts, 3)
    _equal(group, array[own], wanted[own], f"reduce_scatter of {numel} {dtype} by {cuts} over 3")


def _check_maximum(group: Group) -> None:
    array = drawn(_own(group), 9, "int32", "maximum")
    group.maximum(array)
    _equal(group, array, np.max([drawn(rank, 9, "int32", "maximum") for rank in group.members], axis=0), "maximum")


def _check_exchange(group: Group, round_: int) -> None:
    """Each member sends each other another number of bytes: some none, and for some of these the place is None, for others empty."""

    def payload(sender: int, receiver: int) -> NDArray[np.uint8]:
        numel = (0, 1, 70_001)[(sender + 2 * receiver + round_) % 3]
        return np.random.default_rng([sender, receiver, round_]).integers(0, 256, numel).astype(np.uint8)

    own = group.index
    outgoing = [payload(own, other) for other in range(len(group.members))]
    wanted = [payload(other, own) for other in range(len(group.members))]
    incoming = [None if not each.size and index % 2 else np.zeros(each.size, np.uint8) for index, each in enumerate(wanted)]
    group.exchange([None if not each.size and index % 2 else each for index, each in enumerate(outgoing)], incoming)
    for index, place in enumerate(incoming):
        if place is not None:
            _equal(group, place, wanted[index], f"exchange with member {index}")
