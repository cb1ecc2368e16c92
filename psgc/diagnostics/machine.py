"""The machine that a measurement was made on, in one line, for tables of figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def machine(packages: Sequence[str] = ("torch", "numba")) -> str:
    """CPU, cores, Python, and the versions of these packages."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return ", ".join([model, f"{os.cpu_count()} cores", f"Python {platform.python_version()}", *versions])
