"""A job's tokens in a file (PSGC_TOKEN_FILE), which is read again when it changes, so that a token is replaced while the job goes on.

One token a line, the newest first; blank lines, and what follows a #, are left out. A process proves itself by any of them, and takes any of them as proof; the
scheduler listens under the last, the oldest. So while old and new stand in all files, it does not matter which process has read which.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from psgc.errors import ConfigError

MOST: Final = 4  # tokens: a process that is refused tries one after the other


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


class TokenFile:
    """Whether the file is another than when it was last looked at; at the first look it is, because it was read before, and may have been replaced since.
    path: "" for none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        before, self._stamp = self._stamp, self._look()
        return self._stamp != before

    def read(self) -> tuple[str, ...]:
        """Raises ConfigError as ``read_tokens``."""
        return read_tokens(self._path)

    def _look(self) -> tuple[int, int, int] | None:
        """Of what a name leads to now: Kubernetes replaces the link."""
        try:
            status = os.stat(self._path) if self._path else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


__all__ = ["TokenFile", "read_tokens"]
