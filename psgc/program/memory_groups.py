"""Groups of threads in one process, over plain queues: the reference that other backends are tested against.

Each collective is its plain definition: members send each other copies of their arrays. Nothing here is optimised.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.errors import GroupError, UsageError
from psgc.program.checks import check_array, check_cuts, check_members, check_payloads, check_root
from psgc.program.groups import Bytes
from psgc.program.sums import sum_in_order

Array = NDArray[Any]
Members = tuple[int, ...]


class MemoryWorld:
    """The state shared by threads that play the ranks 0 to size - 1 of a job."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        """timeout_s: how long a member waits for another before it raises GroupError."""
        self.size, self.timeout_s = size, timeout_s
        self._lock = threading.Lock()
        self._queues: dict[tuple[Members, int, int], queue.SimpleQueue[Any]] = {}

    def groups(self, rank: int) -> MemoryGroups:
        """The groups of one rank, for its thread."""
        return MemoryGroups(self, rank)

    def queue(self, members: Members, sender: int, receiver: int) -> queue.SimpleQueue[Any]:
        """The queue of what one member sends to another."""
        with self._lock:
            return self._queues.setdefault((members, sender, receiver), queue.SimpleQueue())


class MemoryGroups:
    """See psgc.program.groups.Groups."""

    def __init__(self, world: MemoryWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._groups: dict[Members, MemoryGroup] = {}
        self._closed = False

    def group(self, members: Members) -> MemoryGroup:
        if self._closed:
            raise UsageError("the groups of this rank are closed")
        check_members(members, self._rank, self._world.size)
        if members not in self._groups:
            self._groups[members] = MemoryGroup(self._world, members, members.index(self._rank))
        return self._groups[members]

    def on_device(self, members: Members, device: object) -> None:
        return None

    def close(self) -> None:
        self._closed = True


class MemoryGroup:
    """See psgc.program.groups.Group. Members whose calls differ in kind, element type or size get GroupError."""

    def __init__(self, world: MemoryWorld, members: Members, index: int) -> None:
        self.members, self.index = members, index
        self._world = world

    def all_reduce(self, array: Array, dtype: str) -> None:
        check_array(array, dtype)
        array[:] = sum_in_order(self._arrays_of_all(f"all_reduce of {array.size} {dtype}", array), dtype)

    def maximum(self, array: Array) -> None:
        check_array(array, "int32")
        array[:] = np.max(self._arrays_of_all(f"maximum of {array.size}", array), axis=0)

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        total = sum_in_order(self._arrays_of_all(f"reduce of {array.size} {dtype} to {root}", array), dtype)
        if self.index == root:
            array[:] = total
        else:
            _make_undefined(array)

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        array[:] = self._arrays_of_all(f"broadcast of {array.size} {dtype} from {root}", array)[root]

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        arrays = self._arrays_of_all(f"reduce_scatter of {dtype} by {list(cuts)} over {divisor}", array)
        own = slice(cuts[self.index], cuts[self.index + 1])
        total = sum_in_order([each[own] for each in arrays], dtype, divisor)
        _make_undefined(array)
        array[own] = total

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        for index, theirs in enumerate(self._arrays_of_all(f"all_gather of {dtype} by {list(cuts)}", array)):
            array[cuts[index] : cuts[index + 1]] = theirs[cuts[index] : cuts[index + 1]]

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        check_payloads(outgoing, incoming, len(self.members))
        for index, payload in enumerate(outgoing):
            if payload is not None and len(payload):
                self._send(index, "exchange", bytes(payload))
        for index, place in enumerate(incoming):
            if place is not None and len(place):
                payload = self._receive(index, "exchange")
                if len(payload) != len(place):
                    raise GroupError(f"{self}: member {index} sent {len(payload)} bytes in an exchange, {len(place)} were expected")
                np.asarray(place)[:] = np.frombuffer(payload, np.uint8)

    def __str__(self) -> str:
        return f"group of ranks {', '.join(map(str, self.members))}"

    def _arrays_of_all(self, what: str, array: Array) -> list[Array]:
        """A copy of every member's array. Raises GroupError if members call different collectives (``what``)."""
        for index in range(len(self.members)):
            self._send(index, what, array.copy())
        return [self._receive(index, what) for index in range(len(self.members))]

    def _send(self, to: int, what: str, payload: Any) -> None:
        self._world.queue(self.members, self.index, to).put((what, payload))

    def _receive(self, sender: int, what: str) -> Any:
        try:
            theirs, payload = self._world.queue(self.members, sender, self.index).get(timeout=self._world.timeout_s)
        except queue.Empty:
            raise GroupError(f"{self}: {what}: nothing came from member {sender} within {self._world.timeout_s:g} s") from None
        if theirs != what:
            raise GroupError(f"{self}: member {self.index} does {what}, member {sender} {theirs}: every member must make the same calls")
        return payload


def _make_undefined(array: Array) -> None:
    """Overwrite contents that a collective leaves undefined, so that no caller relies on them."""
    array.view(np.uint8)[:] = 0 if array.dtype == np.bool_ else 0xA5
