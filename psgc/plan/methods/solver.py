"""scipy's HiGHS for linear and mixed-integer programmes, with nothing on standard output.

Owns the import of the solver and its silence. Knows no programme.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from psgc.errors import ConfigError


@functools.cache
def solver() -> Any:
    """scipy.optimize, which is not typed throughout. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError:
        raise ConfigError("bounds need scipy, which psgc is installed with; pip install scipy") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """HiGHS writes some of its debugging past Python, to the process' standard output, which may be a JSON document's."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
