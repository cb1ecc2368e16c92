"""Files that users ask for: refused before the work where they clearly cannot be written, and written after it."""

from __future__ import annotations

from pathlib import Path

from psgc.errors import UsageError


def check_place(path: Path | None, flag: str) -> None:
    """Raise UsageError, naming the flag, where a file clearly cannot be written: before the work is done that is to go there."""
    if path is not None and path.is_dir():
        raise UsageError(f"{flag} {path}: Is a directory")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: No such file or directory: {path.parent}")


def write(path: Path, text: str, flag: str) -> None:
    """Write a file that the user asked for. Raises UsageError naming the flag."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
