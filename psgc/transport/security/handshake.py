"""How both ends of a payload connection prove that they belong to the job, before anything else is sent on it.

Pure: bytes in, bytes out. Each message has a fixed length, so no more bytes are read than expected; a refused peer gets no answer.

    server -> worker   CHALLENGE   a nonce
    worker -> server   ANSWER      rank, epoch, a nonce, the worker's host; HMAC over all of it and the server's nonce
    server -> worker   WELCOME     HMAC over the same under another label

The scheduler draws a data key for the job. A server knows it; a worker only knows its own key, which is derived from it. So a worker can
only prove its own rank. The nonces make each proof valid for one connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

from psgc.errors import RemoteProtocolError
from psgc.wire.messages import ErrorCode

VERSION: Final = 1
NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
PATIENCE_S: Final = 10.0  # limit on a handshake
ENCRYPTED: Final = 1  # flag: the messages that follow are under AES-GCM

# One row a field of each message: name, struct code, meaning. PROTOCOL.md shows the same tables; a test holds the two together.
CHALLENGE_FIELDS: Final = (
    ("magic", "4s", "the four bytes PSGs"),
    ("version", "B", "of the handshake, 1"),
    ("flags", "B", "1: payloads are encrypted"),
    ("pad", "H", "0"),
    ("nonce", "32s", "random"),
)
ANSWER_FIELDS: Final = (
    ("magic", "4s", "the four bytes PSGw"),
    ("version", "B", "of the handshake, 1"),
    ("flags", "B", "as the challenge's; else the server refuses"),
    ("pad", "H", "0"),
    ("rank", "I", "the worker's"),
    ("epoch", "I", "the job's"),
    ("nonce", "32s", "random"),
    ("host", "32s", "SHA-256 of the worker's host id"),
    ("proof", "32s", "HMAC-SHA256 under the worker's key of `worker` and the transcript"),
)
WELCOME_FIELDS: Final = (
    ("magic", "4s", "the four bytes PSGs"),
    ("version", "B", "of the handshake, 1"),
    ("flags", "B", "as the challenge's"),
    ("pad", "H", "0"),
    ("proof", "32s", "HMAC-SHA256 under the worker's key of `server` and the transcript"),
)


def _struct(fields: tuple[tuple[str, str, str], ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(code for _, code, _ in fields))


CHALLENGE, ANSWER, WELCOME = map(_struct, (CHALLENGE_FIELDS, ANSWER_FIELDS, WELCOME_FIELDS))
OF_SERVER: Final = b"PSGs"
_OF_WORKER: Final = b"PSGw"
_PLACE: Final = struct.Struct("<IIIB")  # of the transcript: server's index, rank, epoch, flags


def worker_key(data_key: bytes, rank: int, epoch: int) -> bytes:
    """The key of one worker in one epoch. The scheduler tells it to the worker; servers derive it."""
    return hmac.digest(data_key, b"psgc/1 rank %d, epoch %d" % (rank, epoch), "sha256")


def host_digest(host: str) -> bytes:
    return hashlib.sha256(host.encode()).digest()


class Refused(RemoteProtocolError):
    """The peer has not proved its identity. kind: the reason, as a text without any of the peer's bytes."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text, ErrorCode.NOT_ADMITTED)
        self.kind = kind


class Proof(ABC):
    """One end's side of one handshake. transport: its label, "tcp" or "unix"; a proof on one transport is not valid on another.
    rank: the worker's; at the server -1 until it is proved."""

    _peer_magic: ClassVar[bytes]

    def __init__(self, transport: str, server: int, epoch: int, rank: int, nonce: bytes, encrypt: bool) -> None:
        self._transport, self._server, self.epoch, self._nonce = transport, server, epoch, nonce
        self.rank = rank
        self.encrypted = encrypt
        self.done = False
        self.key_to_server = self.key_to_worker = b""  # this connection's keys, once it is proved
        self._heard = b""

    @property
    @abstractmethod
    def wants(self) -> int:
        """How many more bytes are to be read; 0 once all has been received."""

    @abstractmethod
    def begin(self) -> bytes:
        """The bytes to send first."""

    @property
    @abstractmethod
    def keys(self) -> tuple[bytes, bytes]:
        """Once ``done``: this connection's keys, for sending and for receiving at this end."""

    @abstractmethod
    def _answer(self, message: bytes) -> bytes: ...

    def receive(self, data: bytes) -> bytes:
        """Take bytes that have come, at most ``wants``. Returns the bytes to send. Raises Refused."""
        wants = self.wants
        self._heard += data
        if self._heard[:4] != self._peer_magic[: len(self._heard)]:
            raise Refused("not psgc", f"it begins with {self._heard[:4]!r}, which is not psgc")
        if len(data) < wants:
            return b""
        message, self._heard = self._heard, b""
        if message[4] != VERSION:
            raise Refused("version", f"handshake version {message[4]}, expected {VERSION}: install one psgc everywhere")
        if message[5] != self._flags:
            raise Refused("encryption", "one end encrypts and the other does not: set PSGC_ENCRYPT alike everywhere")
        return self._answer(message)

    @property
    def _flags(self) -> int:
        return ENCRYPTED if self.encrypted else 0

    def _prove(self, key: bytes, rank: int, of_server: bytes, of_worker: bytes, host: bytes) -> tuple[bytes, bytes]:
        """Both proofs, the worker's first. Also makes the connection's keys."""
        place = _PLACE.pack(self._server, rank, self.epoch, self._flags)
        transcript = self._transport.encode().ljust(8, b"\0") + place + of_server + of_worker + host
        labels = (b"worker", b"server", b"to server", b"to worker")
        worker, server, self.key_to_server, self.key_to_worker = (hmac.digest(key, label + transcript, "sha256") for label in labels)
        return worker, server


class ServerProof(Proof):
    """The accepting end. key_of: a rank's key. nonce: never used before."""

    _peer_magic = _OF_WORKER

    def __init__(
        self, transport: str, server: int, epoch: int, workers: int, key_of: Callable[[int], bytes], nonce: bytes, *, encrypt: bool = False
    ) -> None:
        super().__init__(transport, server, epoch, -1, nonce, encrypt)
        self._workers, self._key_of = workers, key_of

    @property
    def keys(self) -> tuple[bytes, bytes]:
        return self.key_to_worker, self.key_to_server

    @property
    def wants(self) -> int:
        return 0 if self.done else ANSWER.size - len(self._heard)

    def begin(self) -> bytes:
        return CHALLENGE.pack(OF_SERVER, VERSION, self._flags, 0, self._nonce)

    def _answer(self, message: bytes) -> bytes:
        _, _, _, _, rank, epoch, nonce, host, proof = ANSWER.unpack(message)
        if rank >= self._workers:
            raise Refused("rank", f"it says it is rank {rank}, but there are {self._workers} workers")
        if epoch != self.epoch:
            raise Refused("epoch", f"it is of epoch {epoch}, now it is {self.epoch}")
        wanted, own = self._prove(self._key_of(rank), rank, self._nonce, nonce, host)
        if not hmac.compare_digest(wanted, proof):
            raise Refused("proof", f"it says it is rank {rank} and cannot prove it: a stranger, or a worker of another job")
        self.rank, self.done = rank, True
        return WELCOME.pack(OF_SERVER, VERSION, self._flags, 0, own)


class WorkerProof(Proof):
    """The connecting end. key: the rank's own."""

    _peer_magic = OF_SERVER

    def __init__(
        self, transport: str, server: int, epoch: int, rank: int, key: bytes, host: str, nonce: bytes, *, encrypt: bool = False
    ) -> None:
        super().__init__(transport, server, epoch, rank, nonce, encrypt)
        self._key, self._host = key, host_digest(host)
        self._wanted = b""  # the server's proof, once challenged

    @property
    def keys(self) -> tuple[bytes, bytes]:
        return self.key_to_server, self.key_to_worker

    @property
    def wants(self) -> int:
        return 0 if self.done else (WELCOME if self._wanted else CHALLENGE).size - len(self._heard)

    def begin(self) -> bytes:
        return b""

    def _answer(self, message: bytes) -> bytes:
        if self._wanted:
            if not hmac.compare_digest(self._wanted, WELCOME.unpack(message)[-1]):
                raise Refused("proof", "it cannot prove that it is this job's server: does another job's use its address?")
            self.done = True
            return b""
        of_server = CHALLENGE.unpack(message)[-1]
        own, self._wanted = self._prove(self._key, self.rank, of_server, self._nonce, self._host)
        return ANSWER.pack(_OF_WORKER, VERSION, self._flags, 0, self.rank, self.epoch, self._nonce, self._host, own)
