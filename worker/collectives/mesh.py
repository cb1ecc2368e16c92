"""What the members of a group on one host share: a segment of memory each, and a socket between every two of them.

A member listens on an abstract socket and publishes its name with a secret. Those after it connect, prove that they know the secret, and both
pass the descriptors of their segments. From then on the sockets carry small signals only.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from psgc.errors import GroupError, PsgcError
from psgc.transport import selection
from psgc.transport.host import host_id
from psgc.transport.memory.segment import Bytes, Segment
from psgc.worker.collectives.turns import LEFT, Closed
from psgc.worker.session import Session

CHECK_S: Final = 0.1  # how often a member that waits for others to connect looks whether the job has failed
HELLO_S: Final = 30.0  # limit on a process that has connected, to say who it is: members do at once, unless they are stopped
SECRET_BYTES: Final = 16
MAX_SIGNAL_BYTES: Final = 512
_HELLO: Final = struct.Struct(f"<{SECRET_BYTES}sIQ")  # the listener's secret, the sender's index, and its segment's bytes
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class _Peer(NamedTuple):
    socket: socket.socket
    segment: Segment


class Mesh:
    """The other members of a group, by index. Signals of two members arrive in order; one thread at a time sends and receives them."""

    def __init__(self, members: Sequence[int], index: int, own: Segment, peers: dict[int, _Peer], timeout_s: float) -> None:
        self.members, self.index = tuple(members), index
        self.others = tuple(peers)
        self._own, self._peers, self._timeout_s = own, peers, timeout_s
        self.ended = False
        for peer in peers.values():
            peer.socket.settimeout(timeout_s)

    def bytes_of(self, index: int) -> Bytes:
        """The segment of the member with this index, which all members see."""
        return self._own.bytes if index == self.index else self._peers[index].segment.bytes

    def signal(self, data: bytes) -> None:
        """Send ``data``, at most MAX_SIGNAL_BYTES, to every other member. What was written to this member's segment before is there when it
        arrives. Raises Closed."""
        for index, peer in self._peers.items():
            try:
                peer.socket.send(data)
            except OSError as error:
                raise self._closed(index, error) from None

    def wait(self, index: int) -> bytes:
        """The next signal of the member with this index. Raises Closed."""
        try:
            data = self._peers[index].socket.recv(MAX_SIGNAL_BYTES)
        except OSError as error:
            raise self._closed(index, error) from None
        if not data:
            raise self._closed(index, None)
        return data

    def end(self) -> None:
        """End what waits for a signal, from any thread: it raises Closed, and so does whatever comes later."""
        self.ended = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back the sockets and the descriptors. The mesh must be idle on this member."""
        self.ended = True
        for peer in self._peers.values():
            peer.socket.close()
            peer.segment.close()
        self._own.close()

    def _closed(self, index: int, error: OSError | None) -> Closed:
        if self.ended:
            return Closed(LEFT)
        who = f"rank {self.members[index]}"
        if isinstance(error, TimeoutError):
            return Closed(f"{who} has not come to it within {self._timeout_s:g} s")
        return Closed(f"{who} has left the group" + (f" ({error.strerror})" if error is not None and error.strerror else ""))


def share_memory(session: Session, members: tuple[int, ...]) -> bool:
    """Whether all of them are one node's workers on one host, of one user, and all may use shared memory; every member gets the same answer.
    Raises what ends the job meanwhile."""
    ends = list(itertools.accumulate(session.ranks.node_sizes))
    if bisect.bisect_right(ends, members[0]) != bisect.bisect_right(ends, members[-1]):
        return False
    config = session.config
    simulated = bool(config.link_mbit)  # the node is: its workers go over TCP to others alone
    allowed = simulated or any(transport.local for transport in selection.allowed(config))
    own = f"{host_id()} {os.getuid()}".encode() if allowed else b""
    session.publish(f"shares memory: {session.rank}", own)
    told = {own if member == session.rank else session.lookup(f"shares memory: {member}") for member in members}
    return len(told) == 1 and bool(own)


def connect(session: Session, members: tuple[int, ...], purpose: str, nbytes: int) -> Mesh:
    """Meet the other members, all of this host, each of which calls this, too. purpose: a name of the group that is unique among the job's published
    values. nbytes: of each member's segment.

    Raises the error that ends the job meanwhile; GroupError for a member that does not come, or one that cannot share memory.
    """
    index = members.index(session.rank)
    own = Segment.create("psgc-group", nbytes)
    name, secret = f"psgc/group/{os.getpid()}/{secrets.token_hex(8)}", secrets.token_bytes(SECRET_BYTES)
    peers: dict[int, _Peer] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        listener.bind("\0" + name)
        listener.listen(len(members))
        if index < len(members) - 1:
            session.publish(f"{purpose}/{index}", secret + name.encode())
        try:
            for other in range(index):
                told = session.lookup(f"{purpose}/{other}")
                peers[other] = _dial(told[SECRET_BYTES:].decode(), told[:SECRET_BYTES], index, own)
            until = time.monotonic() + session.config.step_timeout_s
            listener.settimeout(CHECK_S)
            while missing := [members[other] for other in range(index + 1, len(members)) if other not in peers]:
                session.check()
                if time.monotonic() > until:
                    raise GroupError(f"rank {missing[0]} has not connected within {session.config.step_timeout_s:g} s")
                with contextlib.suppress(TimeoutError):
                    joined = _accept(listener, secret, own)
                    if joined is not None and index < joined[0] < len(members) and joined[0] not in peers:
                        peers[joined[0]] = joined[1]
        except (OSError, PsgcError) as error:
            for peer in peers.values():
                peer.socket.close()
            own.close()
            if isinstance(error, PsgcError):
                raise
            raise GroupError(error.strerror or str(error)) from None
    return Mesh(members, index, own, dict(sorted(peers.items())), session.config.step_timeout_s)


def _dial(name: str, secret: bytes, index: int, own: Segment) -> _Peer:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect("\0" + name)
        socket.send_fds(sock, [_HELLO.pack(secret, index, own.nbytes)], [own.fd])
        answer = _received(sock, secret)
        if answer is None:
            raise GroupError("a member on this host gave no memory to share")
        return _Peer(sock, answer[1])
    except BaseException:
        sock.close()
        raise


def _accept(listener: socket.socket, secret: bytes, own: Segment) -> tuple[int, _Peer] | None:
    """The index of a member that has connected, with its memory; None for a stranger. Raises TimeoutError if nobody comes."""
    sock, _ = listener.accept()
    try:
        sock.settimeout(HELLO_S)
        if _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1] == os.getuid():
            hello = _received(sock, secret)
            if hello is not None:
                socket.send_fds(sock, [_HELLO.pack(secret, hello[0], own.nbytes)], [own.fd])
                return hello[0], _Peer(sock, hello[1])
    except TimeoutError:
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _received(sock: socket.socket, secret: bytes) -> tuple[int, Segment] | None:
    """An index and a segment that the peer passes; None if it passes anything else."""
    data, fds, _, _ = socket.recv_fds(sock, _HELLO.size + 1, 1)
    if len(data) == _HELLO.size and len(fds) == 1:
        told, index, nbytes = _HELLO.unpack(data)
        if secrets.compare_digest(told, secret):
            return index, Segment.attach(fds[0], nbytes)
    for fd in fds:
        os.close(fd)
    return None
