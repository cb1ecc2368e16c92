"""A relay of a process on another host: lines that begin with MARK are notes for the launcher, the others are passed on.

Until the first note they are held back: what ssh says of a connection that does not come about is part of the launcher's own line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from psgc.launch.supervision.relay import Out, Relay

MARK: Final = "\x1epsgc "  # no line of a job's processes begins so: each has its process's name in front
_MARK: Final = MARK.encode()


class NotingRelay(Relay):
    """See the module's text. note: called with each note, without MARK and the line's end."""

    def __init__(self, prefix: str | None, out: Out, note: Callable[[str], None]) -> None:
        super().__init__(prefix, out)
        self._note = note
        self._held: bytes | None = b""  # until the first note
        self._part = b""  # the beginning of a line that may become a note
        self._at_start = True

    def feed(self, data: bytes) -> None:
        passed = b""
        for line in (self._part + data).splitlines(keepends=True):
            whole = line.endswith(b"\n")
            if self._at_start and not whole and (line.startswith(_MARK) or _MARK.startswith(line)):
                self._part = line
                break
            if self._at_start and line.startswith(_MARK):
                passed, self._held = (self._held or b"") + passed, None
                self._note(line[len(_MARK) :].decode(errors="replace").rstrip())
            else:
                passed += line
            self._at_start = whole
        else:
            self._part = b""
        if self._held is not None:
            self._held += passed
            self.words.hear(passed.splitlines())
        elif passed:
            super().feed(passed)

    def finish(self) -> None:
        self._part = b""
        super().finish()
