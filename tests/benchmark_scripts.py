"""Imports the scripts under benchmarks/ as modules, because they are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> Any:
    """The module of that script, run anew."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
