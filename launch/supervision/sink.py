"""A launcher's stdout or stderr, whatever becomes of it: a full disk, a reader that goes, a terminal that is lost. Knows no processes."""

from __future__ import annotations

import errno
import os
import select
import stat
from typing import IO, Any, Final

READERS_END: Final = (errno.EPIPE, errno.ECONNRESET)


class Sink:
    """``stream`` is text with bytes beneath, as sys.stdout. ``write`` never fails: what the stream does not take is lost, and a line in its place says so
    once it takes something again. program: begins that line.

    lost: why that is so now, "" where it is not. gone: nobody reads it any more, so that nothing is written from then on, by others in this process either.
    """

    def __init__(self, stream: IO[str], program: str) -> None:
        self.stream, self._program = stream, program
        self._raw: Any = getattr(stream.buffer, "raw", stream.buffer)  # type: ignore[attr-defined]  # a buffer would keep what the disk does not take
        self._amid_line = False
        self.lost, self.gone = "", False

    def write(self, data: bytes) -> None:
        if self.gone:
            return
        if self.lost:
            begin = "\n" if self._amid_line else ""
            data = f"{begin}{self._program}: output is missing here, because it could not be written ({self.lost})\n".encode() + data
        try:
            self.stream.flush()  # what was printed comes before
            self._write_whole(data)
            self.lost = ""
        except OSError as error:
            self.lost = error.strerror or str(error)
            if self._is_for_good(error):
                self.gone = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._raw.fileno())

    def _write_whole(self, data: bytes) -> None:
        """Only a part is taken where a signal comes amid the write (a child's end is one), and nothing where a stream that does not block is full."""
        rest = memoryview(data)
        while rest:
            taken = self._raw.write(rest)
            if taken is None:
                select.select((), (self._raw,), ())
            elif taken:
                self._amid_line = rest[taken - 1] != ord("\n")
                rest = rest[taken:]

    def _is_for_good(self, error: OSError) -> bool:
        """Whether a reader is gone, or a terminal, rather than a file in need."""
        return error.errno in READERS_END or (error.errno == errno.EIO and not stat.S_ISREG(os.fstat(self._raw.fileno()).st_mode))
