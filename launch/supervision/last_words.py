"""Finds the reason of a process's end in its stderr: the last line and, in a Python traceback, the error and the user's line.

Knows the format of Python's tracebacks. Its input is whole lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from psgc.diagnostics.place import place_of

MAX_REMEMBERED: Final = 400  # characters of a line that are repeated in a message
MAX_FRAMES: Final = 2000  # deeper recursion is cut by Python itself
NEAR_THE_END: Final = 20  # a traceback followed by more lines than this did not end the process
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PSGCS_LOG: Final = re.compile(rb"\b(DEBUG|INFO|WARNING)\b\W+psgc\.\w|^\{\"psgc\": ")  # in this order in every usual format of logging
_FRAME: Final = re.compile(r'\s+File "(.+)", line (\d+)')


class LastWords:
    """See the module's text."""

    def __init__(self) -> None:
        self._last = b""
        self._frames: list[tuple[str, int]] = []
        self._open = False  # inside a traceback
        self._error = ""
        self._since = 0  # lines since the error

    def hear(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if line.strip():
                if not _PSGCS_LOG.search(line):  # what psgc tells of a run is not why the run ended
                    self._last = line
                self._follow(line)

    @property
    def line(self) -> str:
        """The last line that was neither blank nor of psgc's log, without colours, cut to a few hundred characters."""
        return _short(self._last.decode(errors="replace"))

    @property
    def error(self) -> str:
        """ "ValueError: bad batch (train.py:17)" if the output ended with a traceback, or nearly so; else ""."""
        if not self._error or self._since > NEAR_THE_END:
            return ""
        where = place_of(self._frames)
        return self._error + (f" ({where})" if where else "")

    def _follow(self, raw: bytes) -> None:
        self._since += 1
        inside = raw[:1] in b" \x1b"
        if not self._open and not inside and not raw.startswith(b"Traceback"):
            return  # of most lines nothing more has to be known
        line = _ESCAPES.sub("", raw.decode(errors="replace"))
        if line.startswith("Traceback (most recent call last)"):
            self._open, self._frames = True, []
        elif found := _FRAME.match(line):  # a syntax error of the script itself has no other line before it
            if not self._open:
                self._open, self._frames = True, []
            if len(self._frames) < MAX_FRAMES:
                self._frames.append((found[1], int(found[2])))
        elif self._open and not line[:1].isspace():
            self._open, self._error, self._since = False, _short(line).removeprefix("psgc.errors."), 0


def _short(line: str) -> str:
    text = _ESCAPES.sub("", line).strip()
    return text if len(text) <= MAX_REMEMBERED else text[:MAX_REMEMBERED] + " ..."
