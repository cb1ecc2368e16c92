"""How the state of a training gets from a rank that has it to one that needs it: over a connection of their own, as members of groups have.

Invariant: a handover that fails, because either end has died, ends nothing but itself; the rank that needs the state asks for another.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.errors import GroupError
from psgc.transport.tcp import TRANSPORT
from psgc.worker.session import Handover, Session

POLL_S: Final = 0.05
PIECE_BYTES: Final = 64 << 20  # of a tensor on a device, which is copied to the host before it leaves
_HEAD: Final = struct.Struct("<?Q")  # whether there is a state yet, and the bytes of its description


class _Quiet:
    """A session for a group whose failure is not the job's. given_up: whether the handover has failed."""

    def __init__(self, session: Session, given_up: Callable[[], bool]) -> None:
        self._session, self._given_up = session, given_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def check(self) -> None:
        self._session.check()
        if self._given_up():
            raise GroupError("the handover has been given up")

    @property
    def failed(self) -> bool:
        """A broken handover waits for no word of the job's failure: whoever reads the state for it holds up the training."""
        return True

    def lookup(self, name: str) -> bytes:
        """As the session's, until the handover is given up."""
        found: list[bytes] = []
        keep = found.append
        self._session.lookup_soon(name, keep)
        try:
            while not found:
                self.check()
                time.sleep(POLL_S)
        finally:
            if not found:  # else it would be asked for again on each new connection, though nobody will publish it
                self._session.give_up_lookup(name, keep)
        return found[0]

    def tell_broken(self, text: str) -> None:
        raise GroupError(text)

    def fail(self, text: str) -> None:
        raise GroupError(text)


class Channel:
    """Between the giver and the taker of one handover. Raises GroupError where the other end is gone, or what has ended the job."""

    def __init__(self, session: Session, handover: Handover, given_up: Callable[[], bool]) -> None:
        from psgc.worker.collectives.connections import connect
        from psgc.worker.collectives.socket_group import SocketGroup  # has a kernel, which most jobs do without

        me, other = session.rank, handover.other
        members = (other, me) if handover.takes else (me, other)  # the giver is first: it publishes where it listens
        quiet = cast("Session", _Quiet(session, given_up))
        self._takes = handover.takes
        self._group = SocketGroup(quiet, connect(quiet, members, f"state {handover.number}", TRANSPORT))

    def close(self) -> None:
        self._group.close()

    def give(self, state: tuple[bytes, Sequence[torch.Tensor]] | None) -> None:
        """None: the training has not begun."""
        head = b"" if state is None else state[0]
        self._move(np.frombuffer(_HEAD.pack(state is not None, len(head)), np.uint8).copy())
        if state is None:
            return
        self._move(np.frombuffer(head, np.uint8).copy())
        for tensor in state[1]:
            for piece in _pieces(tensor):
                self._move(piece.cpu().numpy())

    def take(self, places: Callable[[bytes], tuple[Any, list[torch.Tensor]]]) -> Any:
        """What the other end gives. places: as of ``TrainingState``. None: the training has not begun."""
        first = np.empty(_HEAD.size, np.uint8)
        self._move(first)
        begun, nbytes = _HEAD.unpack(first.tobytes())
        if not begun:
            return None
        head = np.empty(nbytes, np.uint8)
        self._move(head)
        whole, tensors = places(head.tobytes())
        for tensor in tensors:
            for piece in _pieces(tensor):
                self._move(piece.numpy())
        return whole

    def _move(self, array: NDArray[np.uint8]) -> None:
        if array.size:
            self._group.exchange([None, None if self._takes else array], [array if self._takes else None, None])


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor's bytes, in order."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tuple(flat[lo : lo + PIECE_BYTES] for lo in range(0, flat.numel(), PIECE_BYTES))
