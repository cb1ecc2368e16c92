"""A piece of memory that processes share: a sealed memfd, whose descriptor one process passes to another."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import RemoteProtocolError
from psgc.transport.memory.mapping import map_shared, populate, release
from psgc.wire.messages import ErrorCode

Bytes = NDArray[np.uint8]
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ALIGN: Final = 64


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a cache line, so that neighbouring slots share none."""
    return -(-nbytes // _ALIGN) * _ALIGN


class Segment:
    """A piece of shared memory. Its size is sealed, so a process that maps it can rely on that size. It takes memory only where it is used."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.bytes: Bytes = map_shared(fd, nbytes)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Fresh zeroed memory of at least one page."""
        nbytes = max(nbytes, mmap.PAGESIZE)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map a descriptor that a peer passed, and close it. Raises RemoteProtocolError if it does not match what the peer announced."""
        try:
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if size != nbytes or nbytes < 1 or not seals & fcntl.F_SEAL_SHRINK:
                raise RemoteProtocolError(f"segment of {size} bytes, seals {seals:#x}; expected {nbytes} sealed bytes", ErrorCode.MALFORMED)
            segment = cls(fd, nbytes)
        except (OSError, OverflowError, ValueError) as error:  # a pipe has no seals; or there are more bytes than can be mapped
            raise RemoteProtocolError(f"segment of {nbytes} bytes cannot be mapped: {error}", ErrorCode.MALFORMED) from None
        finally:
            os.close(fd)
        segment.fd = -1
        return segment

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes ``[offset, offset + nbytes)``. Raises RemoteProtocolError outside the segment."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RemoteProtocolError(f"payload at {offset}+{nbytes} is outside its segment of {self.nbytes} bytes", ErrorCode.MALFORMED)
        return self.bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: ``bytes`` of a segment, from ``offset`` on. A transport may send the bytes, or tell the peer where they are. segment: None for
    memory of this process alone, whose bytes only a transport that ``copies`` can carry."""

    segment: Segment | None
    offset: int
    bytes: Bytes

    def part(self, offset: int, nbytes: int) -> Place:
        """The bytes ``[offset, offset + nbytes)`` of this place."""
        return Place(self.segment, self.offset + offset, self.bytes[offset : offset + nbytes])

    def populate(self) -> None:
        """Make its pages, from any thread and without the GIL. Raises OSError where there is no memory."""
        populate(self.bytes)

    def release(self) -> None:
        """Give its memory back: nobody reads or writes it any more. Its addresses stay taken."""
        release(self.bytes)
