"""When a syncer's values are saved, and what becomes of a saving that fails.

Each is written in a thread beside the loop's, one at a time, so that learners are answered meanwhile. All methods are the loop's thread's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from psgc.errors import PsgcError
from psgc.processes.reminder import Reminder
from psgc.server.syncer.picture import Picture, write

logger = logging.getLogger(__name__)
RETRY_S: Final = 60.0  # after a saving that has failed, if the next one is not due sooner


class Saver:
    """path: None: nothing is saved. every_s: from the end of one saving to the beginning of the next. silence_s: as in ``Config``. written: called in
    any thread when a saving has ended, so that the loop calls ``ended``."""

    def __init__(self, path: Path | None, every_s: float, silence_s: float, now: float, written: Callable[[], None]) -> None:
        self._path, self._every_s, self._silence_s, self._written = path, every_s, silence_s, written
        self.changed = False  # since the last picture
        self._due_at = now + every_s
        self._taken_at = self._saved_at = now  # when the last picture was taken; when the one in the file was
        self._unsaved: Reminder | None = None  # of savings that have failed since the last one that did not
        self._pool = ThreadPoolExecutor(1, "psgc-saver")
        self._writing: Future[None] | None = None

    def due(self, now: float) -> bool:
        return self._path is not None and self.changed and self._writing is None and now >= self._due_at

    def soon(self) -> None:
        """The next saving is due now."""
        self._due_at = 0.0

    def begin(self, now: float, picture: Picture) -> None:
        """Begin to write what is now; nothing may be under way."""
        assert self._path is not None
        assert self._writing is None
        self.changed, self._taken_at = False, now
        self._writing = self._pool.submit(write, self._path, picture)
        self._writing.add_done_callback(lambda _: self._written())

    def ended(self, now: float) -> None:
        """The saving under way has ended. A disk that is full for a while costs learners nothing: what one saving lacks, the next that succeeds has."""
        if self._writing is None:
            return
        error, self._writing = self._writing.exception(), None
        if error is None:
            if self._unsaved is not None:
                logger.warning("saved to %s again", self._path)
            self._due_at, self._saved_at, self._unsaved = now + self._every_s, self._taken_at, None
            return
        self.changed, self._due_at = True, now + min(self._every_s, RETRY_S)
        self._unsaved = self._unsaved or Reminder(now - self._silence_s)
        if self._unsaved.due(now, self._silence_s):
            since = now - self._saved_at
            logger.warning("%s; what was pushed in the last %.0f s is not saved, and saving is tried again", said(error, self._path), since)

    def close(self, now: float, picture: Callable[[], Picture]) -> None:
        """Wait for the saving under way, and save what it lacks. Raises PsgcError where that is not possible."""
        self._pool.shutdown()
        self.ended(now)
        if self._path is not None and self.changed:
            write(self._path, picture())


def said(error: BaseException, path: Path | None) -> str:
    return str(error) if isinstance(error, PsgcError) else f"syncer: --save {path}: {type(error).__name__}: {error}"
