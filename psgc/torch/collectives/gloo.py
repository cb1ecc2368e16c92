"""A group of ranks over gloo: a process group of torch.distributed that is constructed directly, and so lives beside the script's own.

Payloads and slices travel by gloo's point-to-point messages, because its collectives want equal sizes. A rank that fails or leaves closes its
connections, which ends the collectives of its peers; where the job fails for another reason, ``abort`` ends them.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from psgc.errors import UsageError
from psgc.program.checks import check_array, check_cuts, check_payloads, check_root, take_turn
from psgc.program.groups import Bytes
from psgc.torch.collectives.connecting import process_group, reason
from psgc.torch.device.engine import Engine
from psgc.worker.collectives.breaking import fail
from psgc.worker.collectives.sums import Adder
from psgc.worker.session import Session

Array = NDArray[Any]
TAG: Final = 1
ABORT_TAG: Final = 2  # nobody ever sends with it
STRIP_BYTES: Final = 4 << 20  # of a slice that is summed: while one strip is added the next ones travel


class GlooGroup:
    """See psgc.program.groups.Group. process_group: of two members or more; None for a group of one."""

    def __init__(self, session: Session, members: tuple[int, ...], process_group: Any) -> None:
        self.members, self.index = members, members.index(session.rank)
        self._session, self._process_group = session, process_group
        self._issuing = threading.Lock()
        self._adder = Adder()
        size = len(members)
        self._others = [(self.index + step) % size for step in range(1, size)]  # so that not all members send to the same one first

    def __str__(self) -> str:
        return f"group of ranks {', '.join(map(str, self.members))}"

    def all_reduce(self, array: Array, dtype: str) -> None:
        check_array(array, dtype)
        if dtype == "int16":  # which gloo does not add
            even = [array.size * index // len(self.members) for index in range(len(self.members) + 1)]
            self.reduce_scatter(array, dtype, even)
            self.all_gather(array, dtype, even)
            return
        operation = _MAXIMUM if dtype == "bool" else _SUM
        self._run(f"all_reduce of {array.size} {dtype}", array.size, lambda group: [group.allreduce([tensor_of(array, dtype)], operation)])

    def maximum(self, array: Array) -> None:
        check_array(array, "int32")
        self._run(f"maximum of {array.size} int32", array.size, lambda group: [group.allreduce([tensor_of(array, "int32")], _MAXIMUM)])

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        if dtype == "int16":
            self.reduce_scatter(array, dtype, [0] * (root + 1) + [array.size] * (len(self.members) - root))
            return
        options: Any = dist.ReduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if dtype == "bool" else dist.ReduceOp.SUM
        options.rootRank = root
        self._run(
            f"reduce of {array.size} {dtype} to rank {self.members[root]}",
            array.size,
            lambda group: [group.reduce([tensor_of(array, dtype)], options)],
        )

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(
            f"broadcast of {array.size} {dtype} from rank {self.members[root]}",
            array.size,
            lambda group: [group.broadcast([torch.from_numpy(array.view(np.uint8))], options)],
        )

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        own = array[cuts[self.index] : cuts[self.index + 1]]
        received = self._adder.places(own, len(self.members) - 1)
        received.insert(self.index, own)
        slices = [array[start:end] for start, end in itertools.pairwise(cuts)]

        def issue(group: Any) -> Iterator[Any]:
            """All messages are begun at once; a strip is added as soon as all members' are there."""
            size = max(1, STRIP_BYTES // array.itemsize)
            strips = [slice(lo, lo + size) for lo in range(0, own.size, size)]
            coming = [[group.recv([_bytes(received[index][strip])], index, TAG) for index in self._others] for strip in strips]
            leaving = [
                group.send([_bytes(slices[index][lo : lo + size])], index, TAG)
                for lo in range(0, max(each.size for each in slices), size)
                for index in self._others
                if lo < slices[index].size
            ]
            for strip, works in zip(strips, coming, strict=True):
                yield from works
                self._adder.add([each[strip] for each in received], self.index, dtype, divisor)
            yield from leaving

        self._run(f"reduce_scatter of {array.size} {dtype}", array.size, issue)
        if len(self.members) == 1:
            self._adder.add(received, self.index, dtype, divisor)

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        incoming = self._slices(array, cuts)
        own = array[cuts[self.index] : cuts[self.index + 1]].view(np.uint8)
        outgoing = [None if index == self.index else own for index in range(len(self.members))]
        self._exchange(f"all_gather of {array.size} {dtype}", outgoing, incoming)

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        check_payloads(outgoing, incoming, len(self.members))
        sent, place = outgoing[self.index], incoming[self.index]
        if sent is not None and place is not None:
            np.asarray(place)[:] = sent
        others = [None if index == self.index else each for index, each in enumerate(outgoing)]
        places = [None if index == self.index else each for index, each in enumerate(incoming)]
        self._exchange("exchange", others, places)

    def abort(self) -> None:
        """End what is under way on this group, from any thread: it raises, and so does whatever comes later."""
        group = self._process_group
        if group is None:
            return
        try:  # gloo closes all of a group's connections when a wait for any message has timed out
            group.recv([torch.empty(1)], (self.index + 1) % len(self.members), ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return

    def close(self) -> None:
        """Leave the group, which must be idle on this rank."""
        self._process_group = None

    def _slices(self, array: Array, cuts: Sequence[int]) -> list[Bytes | None]:
        """Each other member's slice, as bytes."""
        slices = [array[start:end].view(np.uint8) for start, end in itertools.pairwise(cuts)]
        return [None if index == self.index else each for index, each in enumerate(slices)]

    def _exchange(self, what: str, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        def issue(group: Any) -> list[Any]:
            works = []
            for index in self._others:
                place = incoming[index]
                if place is not None and len(place):
                    works.append(group.recv([_bytes(place)], index, TAG))
            for index in self._others:
                payload = outgoing[index]
                if payload is not None and len(payload):
                    works.append(group.send([_bytes(payload)], index, TAG))
            return works

        self._run(what, 1, issue)

    def _run(self, what: str, numel: int, issue: Callable[[Any], Iterable[Any]]) -> None:
        """Issue one collective and wait for each work that ``issue`` gives before it gives the next one. Raises the error that ended the job, else
        GroupError."""
        if len(self.members) == 1 or not numel:
            return
        take_turn(self._issuing, self, what)
        failure: RuntimeError | None = None
        try:
            if self._process_group is None:
                raise UsageError(f"{self} is closed, but {what} was asked of it")
            for work in issue(self._process_group):
                work.wait()
        except RuntimeError as error:
            failure = error
            self.abort()  # no connection of a broken group is of use, and peers that still wait for this rank are told so
        finally:
            self._issuing.release()
        if failure is not None:
            fail(self._session, f"{what} in the {self}", reason(failure))


class Gloo:
    """A ``Carrier``, which takes all members: a group of one has no connections."""

    name, on_gpus = "gloo", False

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        return True

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> GlooGroup:
        return GlooGroup(session, members, process_group(session, members, f"group {name}/") if len(members) > 1 else None)


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the array's memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.uint8) if dtype == "bool" else array)


def _bytes(payload: Bytes) -> torch.Tensor:
    """A tensor over the payload's memory, which may be read-only: torch.from_numpy would warn of that."""
    array = np.asarray(payload)
    if array.flags.writeable:
        return torch.from_numpy(array.view(np.uint8))
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


def _operation(operation: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return options


_SUM: Final = _operation(dist.ReduceOp.SUM)
_MAXIMUM: Final = _operation(dist.ReduceOp.MAX)
