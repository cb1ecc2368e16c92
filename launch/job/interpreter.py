"""A job's command: whether there is such a program, and whether its ``python`` belongs to the environment that psgc is installed in."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from psgc.errors import UsageError


def note_on(command: Sequence[str]) -> str:
    """A note for the user if the command's Python belongs to another environment than this process; else ""."""
    found = shutil.which(command[0]) if re.fullmatch(r"python[\d.]*", os.path.basename(command[0])) else None
    if found is None or _environment(found) == _environment(sys.executable):
        return ""
    return (
        f"{command[0]} is {os.path.abspath(found)}, but psgc is installed for {sys.executable}: if the script cannot import psgc, activate "
        f"that environment, or write that path in place of {command[0]}"
    )


def _environment(interpreter: str) -> Path:
    """The virtual environment's folder, or, outside of one, the resolved path of the interpreter."""
    path = Path(os.path.abspath(interpreter))
    folder = path.parent.parent
    return folder.resolve() if (folder / "pyvenv.cfg").exists() else path.resolve()


def check_command(verb: str, command: Sequence[str]) -> None:
    """Raise UsageError unless the first of a verb's ``command`` is a program."""
    if shutil.which(command[0]) is None:
        hint = f"; write python {command[0]}" if command[0].endswith(".py") else ""
        raise UsageError(f"{verb}: command {command[0]!r} is not found or not executable{hint}")
