"""Collectives of device tensors among a group's members, of floats and of payloads: enqueued on a stream of the group's own, sums taken in member order.

Each member sends its slices by one all-to-all, and adds what comes in member order, in the arithmetic of psgc.program.sums; so the sums are those of groups
over the hosts' memory bit for bit (NaNs apart, of which the payload may differ), whatever order the library would add in. A reduce_scatter moves (P - 1) / P of
the bytes out of each member, as a ring does. The library is torch's: NCCL on GPUs; gloo runs the same code on CPU tensors in tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import aligned


class DeviceCollectives:
    """See the module's text. process_group: of torch.distributed, for tensors on the engine's device; index: this rank's place among ``size`` members.

    Methods enqueue and return, but where the library waits (gloo). Tensors are flat and contiguous; work on ``stream`` begins and ends in the caller's hands:
    ``stream.wait`` before, ``stream.record`` after. One thread at a time calls them. They raise what the library raises, a RuntimeError.
    """

    def __init__(self, engine: Engine, process_group: Any, index: int, size: int) -> None:
        self.stream = engine.side_stream()
        self._engine, self._process_group = engine, process_group
        self._index, self._size = index, size
        self._memory: torch.Tensor | None = None

    def all_reduce(self, flat: torch.Tensor) -> None:
        cuts = self._even(flat)
        self.reduce_scatter(flat, cuts)
        self.all_gather(flat, cuts)

    def reduce(self, flat: torch.Tensor, root: int) -> None:
        """The tensor of the member ``root`` becomes the sum; the others' contents are undefined afterwards."""
        cuts = self._even(flat)
        self.reduce_scatter(flat, cuts)
        own = flat[cuts[self._index] : cuts[self._index + 1]]
        leaving = [own.numel() if index == root else 0 for index in range(self._size)]
        if self._index == root:
            whole = self._room(flat.numel(), flat.dtype)
            self._exchange(whole, own, [end - start for start, end in itertools.pairwise(cuts)], leaving)
            self.stream.run(lambda: flat.copy_(whole), [whole], [flat])
        else:
            self._exchange(self._room(0, flat.dtype), own, [0] * self._size, leaving)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        if not flat.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self.stream.run(lambda: self._process_group.broadcast([flat], options).wait(), [flat], [flat])

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], divisor: int = 1) -> None:
        """This member's slice [cuts[i], cuts[i + 1]) becomes the sum over the divisor; the rest stays."""
        if not flat.numel():
            return
        sizes = [end - start for start, end in itertools.pairwise(cuts)]
        own = flat[cuts[self._index] : cuts[self._index + 1]]
        come = self._room(self._size * own.numel(), flat.dtype)
        self._exchange(come, flat, [own.numel()] * self._size, sizes)
        if own.numel():
            self.stream.run(lambda: add_in_order(come.view(self._size, -1).unbind(), own, divisor), [come], [own])

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        """Every slice becomes that of its member. Slices travel at the size of the largest one."""
        if not flat.numel():
            return
        slices = [flat[start:end] for start, end in itertools.pairwise(cuts)]
        largest = max(each.numel() for each in slices)
        padded = self._room((self._size + 1) * largest, flat.dtype)
        *places, own = padded.view(self._size + 1, largest).unbind()
        count = slices[self._index].numel()
        self.stream.run(lambda: own[:count].copy_(slices[self._index]), [slices[self._index]], [own])
        together = padded[: self._size * largest]
        self.stream.run(lambda: self._process_group._allgather_base(together, own).wait(), [own], [together])
        come = [(place[: each.numel()], each) for place, each in zip(places, slices, strict=True) if each.numel()]
        self.stream.run(
            lambda: torch._foreach_copy_([each for _, each in come], [place for place, _ in come]),
            [place for place, _ in come],
            [each for _, each in come],
        )

    # bytes: each tensor begins at a multiple of 16

    def exchange(self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: torch.Tensor, come: Sequence[int]) -> None:
        """Send each member its tensors. ``incoming`` becomes what the members send here, one behind the other; come: bytes from each."""
        leave = [packed_bytes(tensors) for tensors in outgoing]
        self._exchange(incoming, self._packed([each for tensors in outgoing for each in tensors], sum(leave)), list(come), leave)

    def share(self, own: Sequence[torch.Tensor], together: torch.Tensor) -> None:
        """``together`` becomes each member's tensors: those of each take up as many bytes as those of the largest."""
        packed = self._packed(own, together.numel() // self._size)
        self.stream.run(lambda: self._process_group._allgather_base(together, packed).wait(), [packed], [together])

    def hand_out(self, own: Sequence[torch.Tensor], incoming: torch.Tensor, root: int) -> None:
        """``incoming`` becomes the root's tensors, everywhere but there."""
        self.broadcast(self._packed(own, packed_bytes(own)) if self._index == root else incoming, root)

    def _packed(self, tensors: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
        room, start, places = self._room(nbytes, torch.uint8), 0, []
        for tensor in tensors:
            places.append(room[start : start + tensor.numel()])
            start += aligned(tensor.numel())
        if places:
            self.stream.run(lambda: torch._foreach_copy_(places, list(tensors)), tensors, places)
        return room

    def _exchange(self, incoming: torch.Tensor, outgoing: torch.Tensor, come: list[int], leave: list[int]) -> None:
        """come, leave: elements from and to each member, one behind the other."""
        self.stream.run(lambda: self._process_group.alltoall_base(incoming, outgoing, come, leave).wait(), [outgoing], [incoming])

    def _even(self, flat: torch.Tensor) -> list[int]:
        return [flat.numel() * index // self._size for index in range(self._size + 1)]

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the group's own, for one collective."""
        nbytes = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = self._engine.empty(max(nbytes, 16), torch.uint8)
        return self._memory[:nbytes].view(dtype)


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """What tensors of bytes take up one behind the other."""
    return sum(aligned(tensor.numel()) for tensor in tensors)


def add_in_order(contributions: Sequence[torch.Tensor], out: torch.Tensor, divisor: int = 1) -> None:
    """``out`` becomes the sum of floats, left to right, over the divisor: as psgc.program.sums has it, 16-bit floats in float32, rounded once. Called within
    ``Stream.run``; the contributions' contents are undefined afterwards."""
    first, *others = contributions
    total = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first
    for other in others:
        total.add_(other)
    if divisor != 1:
        by = torch.full((1,), divisor, dtype=total.dtype, device=total.device)
        total.div_(by.expand_as(total))  # by a number, torch would multiply with its reciprocal
    out.copy_(total)
