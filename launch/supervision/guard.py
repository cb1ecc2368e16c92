"""The launcher's side of its guardian (guardian.py): starts it, keeps its list of process groups, and starts another if it is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Final

from psgc.launch.supervision.child import script
from psgc.launch.supervision.guardian import IGNORED

MOST: Final = 10  # guardians of one launcher; if as many were killed, another would be, too


class Guard:
    """Process groups that are killed when this process has ended, however it ended. Raises OSError if the guardian cannot be started."""

    _popen: subprocess.Popen[bytes] | None  # None: no other is started

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._started = 0
        self._start()

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def renewed(self) -> str:
        """Start another guardian if the last one has ended. Returns what to tell the user of that, "" for nothing."""
        if self._popen is None or self._popen.poll() is None:
            return ""
        ended = f"the job's guardian (pid {self._popen.pid}), which ends its processes if this one is killed, has ended itself"
        self._close()
        if self._started == MOST:
            self._popen = None
            return f"{ended}; {MOST} of them did, and no other is started: if this process is killed, end the job's processes yourself"
        try:
            self._start()
        except OSError as error:
            return (
                f"{ended}, and another could not be started ({error.strerror}): if this process is killed, end the job's processes yourself"
            )
        return f"{ended}; another was started"

    def close(self) -> None:
        """End the guardian, which kills the groups that were not removed."""
        if self._popen is not None:
            self._close()
            self._popen = None

    def _start(self) -> None:
        self._popen = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # which it inherits: they do not end it either before it ignores them
        try:
            self._popen = subprocess.Popen(
                script("guardian.py"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._started += 1
        self._tell("".join(f"+{group}\n" for group in sorted(self._groups)))

    def _tell(self, text: str) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._popen.stdin.write(text.encode())
                self._popen.stdin.flush()

    def _close(self) -> None:
        assert self._popen is not None and self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.wait()
