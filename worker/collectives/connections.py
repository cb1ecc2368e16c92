"""What connects the members of a group across hosts: a connection between every two of them, over which both have proved that they are of the group.

A member listens, and publishes where, with a secret; the scheduler hands that out to members of the job alone. Those after it in the group connect. Both ends
prove that they know the secret as worker and server do, and under PSGC_ENCRYPT=1 have keys for what follows. Owns how members meet; what they send each other
is ``socket_group``'s.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from psgc.errors import GroupError
from psgc.transport.host import host_id
from psgc.transport.link import Link, Transport, Trouble
from psgc.transport.pacing import PacedLink
from psgc.transport.security.encryption import Cipher
from psgc.transport.security.gate import Gate
from psgc.transport.security.handshake import KEY_BYTES, NONCE_BYTES, Refused, ServerProof, WorkerProof, worker_key
from psgc.transport.socket_link import SocketLink
from psgc.worker.session import Session

CHECK_S: Final = 0.1  # how often a member that waits for others to connect looks whether the job has failed
CONNECT_S: Final = 30.0  # limit on a connection to a member that is known to listen
LABEL: Final = "members"  # of the proofs, which are valid for no server
_NEVER_LITTLE: Final = -1  # TCP_NOTSENT_LOWAT's default


class Connections:
    """The other members of a group, by index. sockets: descriptors in the order of ``others``; ciphers: of the same connections, if they are encrypted; pace:
    the simulated link, if any, that those share whose number in ``paced`` is 1. near: members of this one's node."""

    def __init__(
        self, members: tuple[int, ...], index: int, links: dict[int, SocketLink], timeout_s: float, pace: PacedLink | None, near: Container[int]
    ) -> None:  # fmt: skip
        self.members, self.index = members, index
        self.others = tuple(links)
        self.timeout_s, self.pace = timeout_s, pace
        self.ended = False
        self._sockets = [link.socket for link in links.values()]
        self.sockets: NDArray[np.int64] = np.array([each.fileno() for each in self._sockets], np.int64)
        self.ciphers = [Cipher(*link.proof.keys) for link in links.values() if link.proof.encrypted]
        self.paced: NDArray[np.int64] = np.array([members[other] not in near for other in links], np.int64)
        for other, link in links.items():
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NEVER_LITTLE)
            if pace is not None and members[other] not in near:
                link.slow_down(pace)

    def end(self) -> None:
        """End what waits for a peer, from any thread."""
        self.ended = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, which must be idle."""
        self.ended = True
        for each in self._sockets:
            each.close()


def connect(session: Session, members: tuple[int, ...], purpose: str, transport: Transport) -> Connections:
    """Meet the other members, each of which calls this, too. purpose: a name of the group that is unique among the job's published values. transport: whose
    links are sockets (``SocketLink``).

    Raises the error that ends the job meanwhile; GroupError for a member that does not come, or cannot be reached.
    """
    if len(members) == 1:
        return Connections(members, 0, {}, session.config.step_timeout_s, None, members)
    return _Meeting(session, members, purpose, transport).connections()


class _Meeting:
    """Of one group's members, for the first time."""

    def __init__(self, session: Session, members: tuple[int, ...], purpose: str, transport: Transport) -> None:
        self._session, self._members, self._purpose, self._transport = session, members, purpose, transport
        self._index, self._config = members.index(session.rank), session.config
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._links: dict[int, SocketLink] = {}  # proved ones

    def connections(self) -> Connections:
        listener = self._transport.listen(replace(self._config, port=0, advertise=""))
        gate = Gate([listener], lambda _: self._proof())
        dialing: dict[int, _Dialing] = {}
        try:
            if self._index < len(self._members) - 1:
                self._session.publish(f"{self._purpose}/{self._index}", self._secret + listener.address.encode())
            for other in range(self._index):
                told = self._session.lookup(f"{self._purpose}/{other}")
                dialing[other] = self._dial(other, told[:KEY_BYTES], told[KEY_BYTES:].decode())
            until = time.monotonic() + self._config.step_timeout_s
            while len(self._links) < len(self._members) - 1:
                self._session.check()
                self._turn(gate, dialing)
                if time.monotonic() > until:
                    missing = next(other for other in range(len(self._members)) if other not in self._links and other != self._index)
                    raise GroupError(f"rank {self._members[missing]} has not connected within {self._config.step_timeout_s:g} s")
        except BaseException:
            for link in (*self._links.values(), *(each.link for each in dialing.values())):
                link.close()
            raise
        finally:
            gate.close()
        pace = PacedLink.of(self._config.link_mbit, self._config.link_fd) if self._config.link_mbit else None
        ranks = self._session.ranks
        near = ranks.on_node(ranks.node_of[self._session.rank])
        return Connections(self._members, self._index, dict(sorted(self._links.items())), self._config.step_timeout_s, pace, near)

    def _proof(self) -> ServerProof:
        def key(rank: int) -> bytes:
            return worker_key(self._secret, rank, 0)

        nonce, rank = secrets.token_bytes(NONCE_BYTES), self._session.rank
        return ServerProof(LABEL, rank, 0, self._session.size, key, nonce, encrypt=self._config.encrypt)

    def _dial(self, other: int, secret: bytes, address: str) -> _Dialing:
        rank = self._session.rank
        dial = self._transport.dialer(address, self._config)

        def link() -> Link:
            nonce, key = secrets.token_bytes(NONCE_BYTES), worker_key(secret, rank, 0)
            return dial(WorkerProof(LABEL, self._members[other], 0, rank, key, host_id(), nonce, encrypt=self._config.encrypt))

        return _Dialing(self._members[other], address, link)

    def _turn(self, gate: Gate, dialing: dict[int, _Dialing]) -> None:
        """Go on with the handshakes."""
        waiting = select.poll()
        waiting.register(gate.fileno(), select.POLLIN)
        for each in dialing.values():
            if not each.link.closed:
                waiting.register(each.link.fileno(), select.POLLIN if each.link.reached else select.POLLOUT)
        waiting.poll(CHECK_S * 1e3)
        for link in gate.serve():
            rank = link.proof.rank
            other = self._members.index(rank) if rank in self._members else -1
            if other <= self._index or other in self._links:
                link.close()  # a worker of the job, but none that this member waits for
            else:
                self._links[other] = cast("SocketLink", link)
        gate.tick()
        for other, one in list(dialing.items()):
            if one.proved():
                self._links[other] = cast("SocketLink", one.link)
                del dialing[other]


class _Dialing:
    """A connection to a member that is known to listen, until it is proved."""

    def __init__(self, rank: int, address: str, dial: Callable[[], Link]) -> None:
        self._rank, self._address, self._dial = rank, address, dial
        self._until = time.monotonic() + CONNECT_S
        self.link = self._dialed()

    def _dialed(self) -> Link:
        try:
            return self._dial()
        except OSError as error:
            raise self._unreached(Trouble(error.errno, error.strerror or str(error))) from None

    def proved(self) -> bool:
        """Go on. Raises GroupError where the member cannot be reached."""
        link = self.link
        try:
            if link.prove():
                return True
        except Refused as error:
            link.close()
            raise GroupError(f"rank {self._rank} at {self._address} is not who it should be: {error}") from None
        if not link.closed and time.monotonic() < self._until:
            return False
        trouble = Trouble(link.number, link.why) if link.closed else Trouble(None, "nothing answers there")
        link.close()
        if time.monotonic() >= self._until:
            raise self._unreached(trouble)
        time.sleep(CHECK_S)  # a name may have several addresses
        self.link = self._dialed()
        return False

    def _unreached(self, trouble: Trouble) -> GroupError:
        return GroupError(
            f"rank {self._rank} cannot be reached at {self._address}: {trouble.text}; check routes and firewalls between workers, or set DMLC_NODE_HOST "
            f"there to the address that the others reach it at"
        )
