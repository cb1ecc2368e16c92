"""What one process prints, passed on line by line under its name. Bytes in, bytes out; knows no processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import BinaryIO, Final

COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93)
PROGRESS_S: Final = 1.0  # a progress bar redraws many times a second; one line a second says as much
MAX_LINE_BYTES: Final = 1 << 20  # what never ends its line is passed on in pieces
MAX_REMEMBERED: Final = 400
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def coloured(label: str, index: int) -> str:
    """``label`` in the ``index``-th colour of a terminal."""
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{label}\x1b[0m"


class Relay:
    """One stream. prefix: put before each line; None: bytes pass unchanged, but whole lines at a time.

    Under a prefix a line that is overwritten by carriage returns (a progress bar) is shown once a second and as it was left.
    """

    def __init__(self, prefix: str | None, out: BinaryIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = None if prefix is None else prefix.encode() + b" "
        self._out, self._clock = out, clock
        self._tail = b""
        self._progress_at = float("-inf")
        self._last = b""

    @property
    def last_line(self) -> str:
        """The last line that was not blank, without colours, cut to a few hundred characters."""
        text = _ESCAPES.sub("", self._last.decode(errors="replace")).strip()
        return text if len(text) <= MAX_REMEMBERED else text[:MAX_REMEMBERED] + " ..."

    def feed(self, data: bytes) -> None:
        """Pass on what ``data`` completes. Raises BrokenPipeError when nobody reads the output."""
        text = self._tail + data
        if self._prefix is None:
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._tail = text[end:]
            self._remember(text[:end])
            self._write(text[:end])
        else:
            self._feed_lines(text)
        if len(self._tail) > MAX_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        tail, self._tail = self._tail, b""
        if tail.strip(b"\r"):
            self._remember(tail)
            self._write(tail if self._prefix is None else self._line(tail))

    def _feed_lines(self, text: bytes) -> None:
        *lines, tail = text.split(b"\n")
        for line in lines:
            self._remember(line)
        written = b"".join(self._line(line) for line in lines)
        overwritten, mark, rest = tail.rpartition(b"\r")
        if mark and rest:  # else the line may yet end: "\r\n"
            tail = rest
            if overwritten.strip(b"\r") and self._clock() - self._progress_at >= PROGRESS_S:
                self._progress_at = self._clock()
                written += self._line(overwritten)
        self._tail = tail
        self._write(written)

    def _line(self, line: bytes) -> bytes:
        assert self._prefix is not None
        return self._prefix + _left_standing(line) + b"\n"

    def _remember(self, text: bytes) -> None:
        for line in reversed(text.splitlines()):
            if line.strip():
                self._last = line
                return

    def _write(self, data: bytes) -> None:
        if data:
            self._out.write(data)
            self._out.flush()


def _left_standing(line: bytes) -> bytes:
    """Of a line overwritten by carriage returns, what a terminal would show at its end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
