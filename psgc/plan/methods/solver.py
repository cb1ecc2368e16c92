"""scipy's HiGHS solver for linear and mixed-integer programmes, kept from writing to standard output.

Owns the solver's import and the suppression of its output. Does not know which programmes are solved.
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
    """scipy.optimize, which is not fully typed. Raises ConfigError if it is missing."""
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError:
        raise ConfigError("bounds need scipy, which psgc is installed with; pip install scipy") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what HiGHS writes to the process's standard output: debugging lines, which bypass Python and would spoil a JSON document there."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
