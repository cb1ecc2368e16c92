"""Passes on one process's output line by line under its name. Bytes in, bytes out; knows no processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from psgc.diagnostics.lines import JSON_BEGINS
from psgc.launch.supervision.last_words import LastWords

COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93)
PROGRESS_S: Final = 1.0  # of a progress bar that redraws many times a second, one line a second is shown
PSGCS_JSON: Final = JSON_BEGINS.encode()  # such a line says itself whose it is, and is to stay JSON
MAX_LINE_BYTES: Final = 1 << 20  # a longer line is passed on in pieces


def coloured(label: str, index: int) -> str:
    """``label`` in the ``index``-th colour of a terminal."""
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{label}\x1b[0m"


class Out(Protocol):
    """What lines are written to, at once."""

    def write(self, data: bytes, /) -> object: ...


class Relay:
    """One stream. prefix: put before each line; None: bytes pass unchanged, but whole lines at a time.

    Under a prefix a line that is overwritten by carriage returns (a progress bar) is shown once a second and as it was left.
    """

    def __init__(self, prefix: str | None, out: Out, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = None if prefix is None else prefix.encode() + b" "
        self.out, self._clock = out, clock
        self._tail = b""
        self._progress_at = float("-inf")
        self.words = LastWords()
        self.amid_line = False  # what was written last has no end of its line

    def feed(self, data: bytes) -> None:
        """Take ``data``, and pass on the lines that it completes."""
        text = self._tail + data
        if self._prefix is None:
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._tail = text[end:]
            self.words.hear(text[:end].splitlines())
            self._write(text[:end])
        else:
            self._feed_lines(text)
        if len(self._tail) > MAX_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        tail, self._tail = self._tail, b""
        if tail.strip(b"\r"):
            self.words.hear(tail.splitlines())
            self._write(tail if self._prefix is None else self._line(tail))

    def _feed_lines(self, text: bytes) -> None:
        *lines, tail = text.split(b"\n")
        for line in lines:
            self.words.hear(line.splitlines())
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
        return (b"" if line.startswith(PSGCS_JSON) else self._prefix) + _as_shown(line) + b"\n"

    def _write(self, data: bytes) -> None:
        if data:
            self.out.write(data)
            self.amid_line = not data.endswith((b"\n", b"\r"))


def _as_shown(line: bytes) -> bytes:
    """What a terminal would finally show of a line that carriage returns overwrite."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
