"""Shared mappings of files in memory. Making one does not hold the GIL, and keeping one takes no descriptor.

Python's ``mmap`` keeps a duplicate of the descriptor as long as the mapping lives, and Python 3.11's holds the GIL while the kernel makes
the pages: 512 MB stopped all other threads for a second on a busy machine. Calls through ctypes do neither.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED: Final = ctypes.c_void_p(-1).value
_REMOVE: Final = 9  # MADV_REMOVE
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
WORTH_BYTES: Final = 64 << 10  # below this, page faults cost less than the system call


class _Mapping:
    """Owns one mapping; NumPy arrays over it keep it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        weakref.finalize(self, _LIBC.munmap, address, nbytes).atexit = False  # at exit other threads may still use it


def map_shared(fd: int, nbytes: int) -> Bytes:
    """The first ``nbytes`` of a file, to read and write; ``fd`` may be closed afterwards. Makes no pages. Raises OSError."""
    address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes of shared memory: {os.strerror(number)}")
    return np.asarray(_Mapping(address, nbytes))


def populate(piece: Bytes) -> None:
    """Make the pages under a piece of a mapping, which takes a quarter of the time that page faults at the first write take. Raises OSError if
    there is no memory."""
    if piece.nbytes < WORTH_BYTES:
        return
    first = piece.ctypes.data
    start = first - first % mmap.PAGESIZE
    if _LIBC.madvise(start, first + piece.nbytes - start, _POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # EINVAL: an older kernel, which makes the pages when they are written
            raise OSError(number, f"no memory for {piece.nbytes} bytes of shared memory: {os.strerror(number)}")


def release(piece: Bytes) -> None:
    """Give the whole pages inside a piece of a shared mapping back to the system, in every process that maps them; they read as zeros from then on. Where
    the kernel cannot do that, they stay."""
    first = piece.ctypes.data
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        _LIBC.madvise(start, end - start, _REMOVE)
