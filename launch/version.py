"""What ``--version`` prints: the version, and its Python interpreter, because a machine may have several."""

from __future__ import annotations

import platform
import sys

from psgc import __version__


def version_line() -> str:
    return f"psgc {__version__}, Python {platform.python_version()} at {sys.executable}"
