"""What all groups of peers have in common: one thread at a time carries out a collective, and one that breaks ends the group, and then the job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from psgc.errors import UsageError
from psgc.program.checks import take_turn
from psgc.worker.collectives.breaking import fail
from psgc.worker.session import Session

LEFT: Final = "this rank has left the group"


class Closed(Exception):
    """A member has left, has not answered in time, or this one has ended its connections. The text says which."""


class Peers(Protocol):
    """The other members of a group, and what connects this one with them. ended: it has left them."""

    members: tuple[int, ...]
    index: int
    ended: bool

    def end(self) -> None:
        """End what waits for a peer, from any thread: it raises Closed, and so does whatever comes later."""

    def close(self) -> None:
        """Give back what connects them, which nobody may use any more."""


P = TypeVar("P", bound=Peers)


class PeerGroup(Generic[P]):
    """See psgc.program.groups.Group, whose collectives are a subclass's."""

    def __init__(self, session: Session, peers: P) -> None:
        self.members, self.index = peers.members, peers.index
        self._session, self._peers = session, peers
        self._issuing = threading.Lock()

    def __str__(self) -> str:
        return f"group of ranks {', '.join(map(str, self.members))}"

    def abort(self) -> None:
        """End what is under way on this group, from any thread: it raises, and so does whatever comes later."""
        self._peers.end()
        if self._issuing.acquire(blocking=False):  # else the collective under way ends, and closes them
            try:
                self._peers.close()
            finally:
                self._issuing.release()

    def close(self) -> None:
        """Leave the group, which must be idle on this rank."""
        self._peers.close()

    def _in_turn(self, what: str, carry_out: Callable[[], None]) -> None:
        """Carry out one collective. Raises the error that ended the job, else GroupError."""
        try:
            take_turn(self._issuing, self, what)
        except UsageError:
            if self._peers.ended:  # by another thread, which closes them now
                fail(self._session, f"{what} in the {self}", LEFT)
            raise
        try:
            if not self._peers.ended:
                carry_out()
            if not self._peers.ended:
                return
            reason = LEFT
        except Closed as error:
            reason = str(error)
        finally:
            self._issuing.release()
        self.abort()  # peers that still wait for this rank are told so
        fail(self._session, f"{what} in the {self}", reason)
