"""A job's tokens in a file (PSGC_TOKEN_FILE), which is read again when it changes, so that a token is replaced while the job goes on.

One token a line, the newest first; blank lines, and what follows a #, are left out. A process proves itself by any of them, and takes any of them as proof; the
scheduler listens under the last, the oldest. So while old and new stand in all files, it does not matter which process has read which.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from psgc.errors import ConfigError, PsgcError

MOST: Final = 4  # tokens: a process that is refused tries one after the other
POLL_S: Final = 0.2  # of a file that is awaited


def read_tokens(path: str) -> tuple[str, ...]:
    """As they stand in the file. Raises ConfigError for one that cannot be read, or has no token or too many."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"PSGC_TOKEN_FILE={path}: it cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"
        ) from None
    tokens = tuple(dict.fromkeys(token for line in text.splitlines() if (token := line.partition("#")[0].strip())))
    if not 1 <= len(tokens) <= MOST:
        raise ConfigError(
            f"PSGC_TOKEN_FILE={path}: it has {len(tokens) or 'no'} tokens; expected 1 to {MOST}, one a line, the newest first"
        )
    return tokens


def await_tokens(path: str, within_s: float) -> tuple[str, ...]:
    """As ``read_tokens``, of a process that follows another in a job that runs: there a file that is gone for a moment changes nothing. Raises PsgcError."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return read_tokens(path)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise PsgcError(f"{error}, for {within_s:g} s (PSGC_DEAD_S)") from None
        time.sleep(POLL_S)


Stamp = tuple[int, int, int, int]


class TokenFile:
    """The file, read again when it is another than when it was last read; at the first look it is, because it may have been replaced since.
    path: "" for none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: Stamp | None = None  # of the file as it was last read
        self._said: tuple[Stamp | None, str] | None = None  # what is wrong with it now, and was raised

    def read_again(self) -> tuple[str, ...] | None:
        """The tokens, if the file has changed. Raises ConfigError as ``read_tokens``, once for each change of the file; it is read again all the same, because
        what could not be read for a moment (another's file, no descriptor left) need not be written again to be readable."""
        if not self._path:
            return None
        stamp = self._look()
        if stamp is not None and stamp == self._stamp:
            self._said = None
            return None
        try:
            tokens = read_tokens(self._path)
        except ConfigError as error:
            if (stamp, str(error)) == self._said:
                return None
            self._said = stamp, str(error)
            raise
        self._stamp, self._said = stamp, None
        return tokens

    def _look(self) -> Stamp | None:
        """Of what a name leads to now: Kubernetes replaces the link."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


__all__ = ["TokenFile", "await_tokens", "read_tokens"]
