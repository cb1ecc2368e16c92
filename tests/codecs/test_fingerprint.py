"""A kernel is compiled again if, and only if, something that determines its machine code has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.codecs.jit import kernel_cache
from psgc.codecs.jit.fingerprint import UnseenError, fingerprint
from tests.preloaded import run_preloaded

SOURCE = '''
"""Kernels of a test."""
import numpy as np
from numba import types
from psgc.codecs.jit.kernel import I64, chosen_by_type, helper, kernel, primitive

TERM, UNUSED = 3, 1
TABLE = np.arange(4)


def added(builder, x, y):
    """Plain Python, called while code is generated."""
    return builder.add(x, y)


@primitive
def plus(_typing, x, y):
    """An instruction."""
    def generate(_context, builder, _signature, arguments):
        return added(builder, arguments[0], arguments[1])
    return types.int64(types.int64, types.int64), generate


def shifted(x):
    """A stub."""
    raise NotImplementedError


@chosen_by_type(shifted)
def choose(x):
    def shift(x):
        return x + 100
    return shift


def family(factor):
    @helper
    def times(x):
        """A closure."""
        return x * factor
    return times


times = family(5)


@helper
def inner(x):
    """A helper."""
    # with a comment
    return plus(times(x), TERM)


@kernel(I64(I64))
def run(x):
    """The kernel."""
    return shifted(inner(x)) + TABLE[2]


def never_called(x):
    return x


print(run(1))
'''

ELSEWHERE = """
import sys
import numba
from psgc.codecs.jit import kernel_cache
sys.dont_write_bytecode = True
numba.config.CACHE_DIR = sys.argv[1]
kernel_cache.cache_folder.cache_clear()
import family
"""  # in a process that has imported Numba, and with it its settings


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., tuple[str, set[str]]]:
    """Runs a source; gives what it prints, and which files the cache then holds beyond those it held before."""
    (tmp_path / "made").mkdir()
    cache = tmp_path / "cache"

    def run(source: str, **environment: str) -> tuple[str, set[str]]:
        (tmp_path / "made" / "family.py").write_text(source)
        before = {path.name for path in cache.rglob("*.nbc")}
        search = os.pathsep.join([str(tmp_path / "made"), *sys.path])
        full = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", **environment}
        if environment:
            done = subprocess.run(
                [sys.executable, "-c", "import family"], env=full, capture_output=True, text=True, timeout=300, check=False
            )
        else:
            done = run_preloaded("-c", ELSEWHERE, str(cache), env=full, timeout=300)
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("compiling kernels") for line in done.stderr.splitlines()), done.stderr
        return done.stdout.strip(), {path.name for path in cache.rglob("*.nbc")} - before

    return run


def edited(*edits: tuple[str, str]) -> str:
    source = SOURCE
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


def digest(source: str) -> str:
    """Of the source's kernel, which is not compiled."""
    scope: dict[str, Any] = {"__name__": "family"}
    exec(source.replace("@kernel(I64(I64))\n", "").replace("print(run(1))", ""), scope)
    return fingerprint(scope["run"])


SAME = {
    "the file's docstring": ("Kernels of a test.", "Other words,\non two lines."),
    "the kernel's docstring": ('"""The kernel."""', '"""Something else."""\n    # and this'),
    "a helper's docstring, gone": ('    """A helper."""\n', ""),
    "a comment": ("# with a comment", "# another"),
    "an instruction's docstring": ('    """An instruction."""\n', ""),
    "a generator's docstring": ('"""Plain Python, called while code is generated."""', "# plain"),
    "a stub's docstring": ('    """A stub."""\n', ""),
    "a closure's docstring": ('"""A closure."""', "# a closure"),
    "a function that is not called": ("never_called(x):\n    return x", "never_called(x):\n    return 7"),
    "a constant that is not used": ("UNUSED = 3, 1", "UNUSED = 3, 2"),
}
OTHER = {
    "a constant": ("TERM, UNUSED = 3", "TERM, UNUSED = 4"),
    "a constant's type": ("TERM, UNUSED = 3", "TERM, UNUSED = 3.0"),
    "an array": ("np.arange(4)", "np.arange(4) * 2"),
    "a helper": ("times(x), TERM", "times(x + 1), TERM"),
    "what a helper encloses": ("family(5)", "family(6)"),
    "an instruction's generator": ("builder.add(x, y)", "builder.sub(x, y)"),
    "an instruction's types": ("types.int64(types.int64,", "types.float64(types.int64,"),
    "what is chosen by type": ("x + 100", "x + 200"),
    "a default": ("def added(builder, x, y):", "def added(builder, x, y, z=1):"),
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_code_changes_no_digest(what: str) -> None:
    assert digest(edited(SAME[what])) == digest(SOURCE)


@pytest.mark.parametrize("what", OTHER)
def test_whatever_a_kernel_is_made_from_is_in_its_digest(what: str) -> None:
    assert digest(edited(OTHER[what])) != digest(SOURCE)


def test_edits_that_change_no_code_load_what_is_kept_and_others_compile(compiled: Callable[..., tuple[str, set[str]]]) -> None:
    printed, made = compiled(SOURCE)
    assert (printed, len(made)) == ("110", 1)
    assert compiled(edited(*SAME.values())) == ("110", set())
    printed, made = compiled(edited(OTHER["what a helper encloses"], OTHER["what is chosen by type"]))
    assert (printed, len(made)) == ("211", 1)


def test_a_kernel_for_another_processor_is_not_loaded(compiled: Callable[..., tuple[str, set[str]]]) -> None:
    _, here = compiled(SOURCE)
    assert len(here) == 1
    for environment in ({"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "+sse4.2"}):
        printed, made = compiled(SOURCE, **environment)
        assert (printed, len(made)) == ("110", 1), environment
    assert compiled(SOURCE) == ("110", set())


def test_a_damaged_file_is_made_again(tmp_path: Path, compiled: Callable[..., tuple[str, set[str]]]) -> None:
    compiled(SOURCE)
    (path,) = (tmp_path / "cache").rglob("*.nbc")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "made"), *sys.path]),
    }
    done = subprocess.run([sys.executable, "-c", "import family"], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "110"
    assert "is damaged and is made again" in done.stderr
    assert compiled(SOURCE) == ("110", set())


def test_kernels_in_the_users_own_folder_are_found_too(tmp_path: Path, compiled: Callable[..., tuple[str, set[str]]]) -> None:
    (tmp_path / "a-file").touch()
    mine = {"XDG_CACHE_HOME": str(tmp_path / "mine")}
    assert compiled(SOURCE, NUMBA_CACHE_DIR=str(tmp_path / "a-file"), **mine) == ("110", set())
    assert len(list((tmp_path / "mine" / "psgc" / "psgc-kernels").iterdir())) == 1
    assert compiled(SOURCE, **mine) == ("110", set())


def scaled(x: Any) -> Any:
    return x * np.float32(SCALE)


SCALE = 2.0


def test_a_value_that_is_set_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(scaled)
    monkeypatch.setitem(scaled.__globals__, "SCALE", 2)
    assert fingerprint(scaled) != before, "equal, but of another type"
    monkeypatch.setitem(scaled.__globals__, "SCALE", 3.0)
    assert fingerprint(scaled) != before
    monkeypatch.setitem(scaled.__globals__, "SCALE", 2.0)
    assert fingerprint(scaled) == before


def test_what_cannot_be_seen_through_is_named_and_not_kept(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaled.__globals__, "SCALE", iter([2.0]))
    with pytest.raises(UnseenError, match="iterator"):
        fingerprint(scaled)
    assert kernel_cache.cache_of(scaled, {}) is None
    assert "kernel scaled is compiled at each start" in caplog.text


def test_functions_that_call_one_another_have_a_digest() -> None:
    scope: dict[str, Any] = {"__name__": "two"}
    exec("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)", scope)
    assert fingerprint(scope["even"]) != fingerprint(scope["odd"])
