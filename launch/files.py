"""Output files that a flag names: checked before the work, written after it."""

from __future__ import annotations

from pathlib import Path

from psgc.errors import UsageError


def check_place(path: Path | None, flag: str) -> None:
    """Raise UsageError, naming the flag, if the file clearly cannot be written. Call it before the work whose result goes there."""
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
