"""A job's command: whether there is such a program, and whether its ``python`` belongs to the environment that psgc is installed in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
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


def words_of(command: Sequence[str]) -> list[str]:
    """``command``, or, where it is one text such as ``"python train.py --epochs 3"``, as bpslaunch takes it, its words; what only a shell understands
    (``"cd /job && python train.py"``) is run by one. Raises UsageError for an open quote."""
    if len(command) != 1 or not re.search(r"\s", command[0]) or shutil.which(command[0]) is not None:
        return list(command)
    (text,) = command
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"worker: command {text!r} is no command line: {error}") from None
    if not words or re.search(r"[|&;<>()$`*?\[\]#~\n]", text) or "=" in words[0]:
        return ["/bin/sh", "-c", text]
    return words


def spares_of(env: Mapping[str, str]) -> int:
    """PSGC_SPARES: how many processes are to wait on each machine. Raises UsageError."""
    text = env.get("PSGC_SPARES", "").strip() or "0"
    if not text.isdecimal():
        raise UsageError(f"PSGC_SPARES={text}: expected how many processes are to wait on each machine, 0 or more")
    return int(text)


def check_spares(command: Sequence[str], spares: int, on_loss: str) -> None:
    """Raise UsageError where processes that wait with their imports done could not become the command."""
    if spares < 0:
        raise UsageError(f"run: --spares {spares}: expected how many processes are to wait, 0 or more")
    if not spares:
        return
    if on_loss == "stop":
        raise UsageError(f"{spares} spares have no effect where a worker's death ends the job; set PSGC_ON_WORKER_LOSS to wait or shrink")
    script = command[1] if len(command) > 1 else ""
    if not re.fullmatch(r"python[\d.]*", os.path.basename(command[0])) or not (script == "-m" or script.endswith(".py")):
        raise UsageError(
            f"{spares} spares: expected a command that a waiting Python can become, `python SCRIPT.py ...` or `python -m MODULE ...`, got `{command[0]}`"
        )


def check_command(verb: str, command: Sequence[str]) -> None:
    """Raise UsageError unless the first of a verb's ``command`` is a program."""
    if shutil.which(command[0]) is None:
        hint = f"; write python {command[0]}" if command[0].endswith(".py") else ""
        raise UsageError(f"{verb}: command {command[0]!r} is not found or not executable{hint}")
