"""The journal of a scheduler: records in files that outlive its process. Knows bytes and files, not what records mean.

Two files, of which the one with the higher generation counts that is whole. A file is a sequence of frames: length and CRC-32 of a body, and the body, JSON.
The first has the generation; then comes what was known when the file was begun, up to a frame that ends it; then what happened since. A frame that is cut off
or does not fit its CRC ends the file: it was being written when the process ended, and nobody had been told of what it says. When a file has grown, what it
comes to is written into the other one, so a journal stays small however long the job runs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from psgc.errors import PsgcError, RemoteProtocolError
from psgc.scheduler.records import LIGHT, Record, from_json, to_json

_FRAME: Final = struct.Struct("<II")  # bytes of the body, its CRC-32
MAGIC: Final = "psgc journal 1"
MOST_BYTES: Final = 256 << 20  # of a frame: layouts and values are far smaller
GROWN_BYTES: Final = 1 << 20  # a file that has grown by less is left as it is
_BEGINS: Final = json.dumps({"journal": MAGIC}, separators=(",", ":")).encode()[:-1]  # the first frame's body
_WHOLE: Final = {"whole": True}


def frame(body: Any) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def frames(data: bytes) -> Iterable[tuple[Any, int]]:
    """The bodies of the whole frames from the beginning, each with where it ends."""
    at = 0
    while at + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if size > MOST_BYTES or len(body) != size or zlib.crc32(body) != crc:
            return
        at += _FRAME.size + size
        try:
            yield json.loads(body), at
        except ValueError:
            return


def read(data: bytes) -> tuple[int, list[Record], int] | None:
    """A file's generation, its records, and where its last whole frame ends. None if it was not begun, or its beginning is not whole.

    Raises RemoteProtocolError for a frame that is whole and no record of this version."""
    generation, records, end, whole = -1, [], 0, False
    for body, at in frames(data):
        if generation < 0:
            if not isinstance(body, dict) or body.get("journal") != MAGIC or not isinstance(body.get("generation"), int):
                return None
            generation = body["generation"]
        elif body == _WHOLE:
            whole = True
        else:
            records.append(from_json(body))
        end = at
    return (generation, records, end) if whole else None


class Journal:
    """See the module's text. fds: the two files, open for reading and writing; they are this object's. name: for messages.

    ``records``: what the process before has left; empty if there was none. Raises PsgcError if that cannot be read."""

    def __init__(self, fds: Sequence[int], name: str) -> None:
        self._fds, self.name = list(fds), name
        self._generation, self._current, self._size, self._begun_bytes = 0, 1, 0, 0
        self.records: list[Record] = []
        try:
            found = [read(_content(fd)) for fd in self._fds]
        except (OSError, RemoteProtocolError) as error:
            raise PsgcError(f"scheduler: the journal {name} cannot be read: {error}; remove it, or use the psgc that wrote it") from None
        for index, file in enumerate(found):
            if file is not None and file[0] > self._generation:
                self._generation, self.records, self._size = file
                self._current = index
                self._begun_bytes = self._size
        if self._generation:
            os.ftruncate(self._fds[self._current], self._size)  # what is behind a torn frame was never said to anybody

    @classmethod
    def at(cls, path: str) -> Journal:
        """A journal in the files ``path`` and ``path``.other, which are made, readable by this user alone. Raises PsgcError, for files of others, and
        for those that another process has open, too."""
        fds: list[int] = []
        try:
            for name in _names(path):
                _check_own(name)
            for name in _names(path):
                fds.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            _lock(fds[0])
            _sync_folder(path)
        except BlockingIOError:
            for fd in fds:
                os.close(fd)
            raise PsgcError(
                f"scheduler: another scheduler that runs writes the journal {path}; end that one first, or name another file (PSGC_JOURNAL)"
            ) from None
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise PsgcError(f"scheduler: the journal {path} cannot be made: {error.strerror} (PSGC_JOURNAL)") from None
        return cls(fds, path)

    @property
    def grown(self) -> bool:
        """Whether it is time to write it anew."""
        return self._size > GROWN_BYTES + 4 * self._begun_bytes

    def begin(self, records: Iterable[Record]) -> None:
        """Write it anew: these are all that counts. Raises OSError."""
        data = frame({"journal": MAGIC, "generation": self._generation + 1})
        data += b"".join(frame(to_json(record)) for record in records) + frame(_WHOLE)
        other = 1 - self._current
        os.ftruncate(self._fds[other], 0)
        _write(self._fds[other], data, 0)
        os.fdatasync(self._fds[other])
        self._current, self._size, self._begun_bytes = other, len(data), len(data)
        self._generation += 1
        os.ftruncate(self._fds[1 - other], 0)

    def append(self, records: Sequence[Record]) -> None:
        """Write these down; they are on disk when it returns, unless all are of the light kinds. Raises OSError."""
        data = b"".join(frame(to_json(record)) for record in records)
        _write(self._fds[self._current], data, self._size)
        self._size += len(data)
        if not all(isinstance(record, LIGHT) for record in records):
            os.fdatasync(self._fds[self._current])

    def forget(self) -> None:
        """The job is over: no process follows this one in it."""
        for fd in self._fds:
            os.ftruncate(fd, 0)
        self._generation, self._current, self._size, self.records = 0, 1, 0, []

    def remove(self) -> None:
        """Remove the files as well, where they have names."""
        self.forget()
        for name in _names(self.name):
            if os.path.isfile(name):
                os.unlink(name)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _check_own(name: str) -> None:
    """Raise PsgcError for a file that is there, and was not made by a journal: it would be overwritten. One whose first frame is cut off may be a journal's."""
    try:
        with open(name, "rb") as file:
            begins = file.read(_FRAME.size + len(_BEGINS))
    except FileNotFoundError:
        return
    if begins.strip(b"\0") and not (len(begins) > _FRAME.size and _BEGINS.startswith(begins[_FRAME.size :].rstrip(b"\0"))):
        raise PsgcError(f"scheduler: {name} is there and is no journal of this psgc; remove it, or name another file (PSGC_JOURNAL)")


def _lock(fd: int) -> None:
    """Keep others from it as long as this process has it open. Raises BlockingIOError if another process has. Where files cannot be locked nobody is kept."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise


def _names(path: str) -> tuple[str, str]:
    return path, f"{path}.other"


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _sync_folder(path: str) -> None:
    """New names are on disk."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
