"""What a syncer's file holds, as arrays, and how it is written: whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EISDIR
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.errors import PsgcError

Picture = dict[str, NDArray[Any]]
"""By name. Nobody writes to any of them, so that any thread may read them."""


def write(path: Path, picture: Picture) -> None:
    """Write everything to a file, which then takes the place of an older one. Raises PsgcError where that is not possible; the older one stays then, as it
    does where the process is killed meanwhile."""
    half = path.with_name(f"{path.name}.half")
    try:
        with half.open("wb") as file:
            arrays: Any = picture
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError as error:
        with suppress(OSError):
            half.unlink()  # it would take room on a disk that is full
        raise PsgcError(f"syncer: --save {path}: {error.strerror or error}") from None


def check_place(path: Path) -> None:
    """Raise PsgcError, before there is anything to lose, where ``write`` could not write there."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        trial = path.with_name(f"{path.name}.test")  # not the name that another syncer may be writing to now
        trial.open("wb").close()
        trial.unlink()
    except OSError as error:
        raise PsgcError(f"syncer: --save {path}: {error.strerror or error}") from None
