"""Compiles the sources that the tests need, each of them once: ``compile_sources`` before several processes collect tests.

Pytest rewrites the assertions of every file of tests, which takes half of the time in which a process collects. It keeps what it has rewritten,
but processes that collect at the same time find nothing kept yet.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def compile_sources(config: pytest.Config) -> None:
    """Those of the tests that the command names, and psgc's own. Does nothing where Python keeps no byte code."""
    if sys.dont_write_bytecode:
        return
    for folder in (ROOT / "psgc", *(link for link in (ROOT / "psgc").iterdir() if link.is_symlink())):
        compileall.compile_dir(folder, quiet=2)
    for path in _tests(config):
        rewrite(path, config)


def rewrite(path: Path, config: pytest.Config) -> None:
    """Keep the file's byte code with its assertions rewritten. Does nothing under a pytest that does this in another way."""
    try:
        from _pytest.assertion import rewrite

        pytests: Any = rewrite
        folder = pytests.get_cache_dir(path)
        kept = folder / (path.stem + pytests.PYC_TAIL)
        if pytests._read_pyc(path, kept) is None and pytests.try_makedirs(folder):
            stamp, code = pytests._rewrite_test(path, config)
            pytests._write_pyc(config.stash[pytests.assertstate_key], code, stamp, kept)
    except (ImportError, AttributeError, TypeError, KeyError, SyntaxError, OSError):  # of a file that is not there pytest tells
        return


def _tests(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = Path(argument.partition("::")[0]).resolve()
        for found in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if found.name.startswith("test_") or found.name == "conftest.py":
                yield found
