"""Which Python a command would run in: ``python`` is whichever the shell's PATH finds first, and it may not be the one that has psgc."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def note_on(command: Sequence[str]) -> str:
    """What to tell a user whose command names a Python of another environment than this process's; else empty."""
    found = shutil.which(command[0]) if re.fullmatch(r"python[\d.]*", os.path.basename(command[0])) else None
    if found is None or _environment(found) == _environment(sys.executable):
        return ""
    return (
        f"{command[0]} is {os.path.abspath(found)}, but psgc is installed for {sys.executable}: if the script cannot import psgc, activate "
        f"that environment, or write that path in place of {command[0]}"
    )


def _environment(interpreter: str) -> Path:
    """A virtual environment's folder; of other interpreters the program itself, whatever links lead to it."""
    path = Path(os.path.abspath(interpreter))
    folder = path.parent.parent
    return folder.resolve() if (folder / "pyvenv.cfg").exists() else path.resolve()
