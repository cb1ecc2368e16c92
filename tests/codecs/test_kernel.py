"""Kernels are compiled ahead of use, cached safely, and neither hold the GIL nor contract arithmetic."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core.dispatcher import Dispatcher

from psgc.codecs import onebit, shared
from psgc.codecs.common import floats
from psgc.codecs.jit import kernel as jit
from psgc.codecs.jit import kernel_cache
from psgc.codecs.jit.kernel import I64, IN_F32, OUT_F32, SCALAR_F32, helper, kernel
from psgc.codecs.jit.kernel_cache import KernelCache
from psgc.codecs.registry import parse_codec
from psgc.codecs.sparsify import elements, largest, sparse
from psgc.plan.local_search import descent, space
from psgc.plan.methods import bound
from psgc.plan.methods import espresso_trials as trial
from psgc.plan.model import bucketing, curves, timeline
from tests.homes import without_home

TINY = """
import numpy as np
from psgc.codecs.common.bits import view_f32
from psgc.codecs.jit.kernel import IN_F32, OUT_BYTES, kernel
from numba import types
from numba.core.dispatcher import Dispatcher

@kernel(types.void(IN_F32, OUT_BYTES))
def double(values, out):
    target = view_f32(out, 1, values.size)
    for i in range(values.size):
        target[i] = values[i] + values[i]

out = np.zeros(9, np.uint8)
double(np.array([1, 2], np.float32), out)
print(out[1:].view(np.float32).tolist())
"""
DOUBLED = "[2.0, 4.0]"


def all_kernels() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [
        (f"{m.__name__}.{n}", f)
        for m in (floats, shared, onebit, elements, largest, sparse)
        for n, f in vars(m).items()
        if hasattr(f, "signatures")
    ]
    return [(name, function) for name, function in found if not getattr(function, "_can_compile", True)]


def test_while_a_kernel_is_compiled_no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it is as before. Collections are not counted: other threads, and libraries that Numba calls, may ask for one."""
    monkeypatch.setattr(jit, "cache_of", lambda *_: None)
    compiles, enabled = Dispatcher.compile, list[bool]()

    def noted(self: Any, signature: Any) -> Any:
        enabled.append(gc.isenabled())
        return compiles(self, signature)

    def double(values, out):  # type: ignore[no-untyped-def]
        for i in range(values.size):
            out[i] = values[i] + values[i]

    monkeypatch.setattr(Dispatcher, "compile", noted)
    kernel(types.void(IN_F32, OUT_F32))(double)
    assert enabled == [False]
    assert gc.isenabled()


def test_every_kernel_is_compiled_on_import_for_one_signature() -> None:
    kernels = all_kernels()
    assert len(kernels) >= 19
    for name, function in kernels:
        assert len(function.signatures) == 1, name


def test_a_call_with_other_types_is_refused_and_not_compiled() -> None:
    with pytest.raises(TypeError):
        onebit._decode("payload", 1, 0, np.zeros(1, np.float32))


def test_a_helper_is_for_kernels_and_a_call_from_python_says_so_instead_of_crashing() -> None:
    @helper
    def increased(x: int) -> int:
        return x + 1

    def refused() -> None:
        with pytest.raises(TypeError, match=r"increased is a helper: kernels call it, Python calls increased\.py_func"):
            increased(4)

    refused()

    @kernel(I64(I64))
    def run(x: int) -> int:
        return increased(x) * 2

    assert run(4) == 10
    refused()  # though it is compiled now


TELLING = """
from psgc.codecs.jit.kernel import I64, helper, kernel

@helper
def root(x):
    print("root of", x)
    if x < 0:
        raise ValueError("below zero", x)
    return int(x**0.5)

@helper
def next_root(x):
    return root(x) + 1

@kernel(I64(I64))
def once(x):
    return next_root(x)

@kernel(I64(I64))
def twice(x):
    return root(next_root(x))

def error_of(x):
    try:
        return once(x)
    except ValueError as error:
        return error.args

print(once(9), twice(9), error_of(-4), [len(kept.overloads) for kept in (root, next_root)])
"""


def test_helpers_print_and_raise_in_every_kernel_whether_it_was_compiled_or_loaded(tmp_path: Path) -> None:
    """What Numba gives a function's machine code for that, a helper has in each kernel."""
    (tmp_path / "telling.py").write_text(TELLING)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for compiled in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", "import telling"], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        wanted = ["root of 9", "root of 9", "root of 4", "root of -4", f"4 2 ('below zero', -4) [{compiled}, {compiled}]"]
        assert done.stdout.splitlines() == wanted, done.stderr


def test_no_machine_code_is_made_of_a_helper_by_itself() -> None:
    @helper
    def tripled(x: int) -> int:
        return 3 * x

    @kernel(I64(I64))
    def run(x: int) -> int:
        return tripled(x) + tripled(x + 1)

    def is_emitted(function: Any) -> bool:
        (compiled,) = function.overloads.values()
        return bool(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))

    tripled.compile((I64,))  # type: ignore[attr-defined]  # by now, unless the kernel came from the cache
    assert is_emitted(run)
    assert not is_emitted(tripled)
    assert run(4) == 27


def test_every_kernel_of_the_package_is_kept() -> None:
    kept = [function for _, function in all_kernels() if "tests" not in function.__module__]
    kept += [
        function
        for text in ("int8", "int4:rotate=1", "fp8", "dithering:partition=natural", "tbq")
        for function in parse_codec(text)._kernels
    ]
    kept += [f for m in (bound, bucketing, curves, descent, space, timeline, trial) for f in vars(m).values() if hasattr(f, "signatures")]
    kernels = [function for function in kept if not function._can_compile]
    assert len(kernels) > 60
    for function in kernels:
        assert isinstance(function._cache, KernelCache), function.__qualname__


@pytest.mark.parametrize(("name", "function"), all_kernels())
def test_every_kernel_lets_go_of_the_interpreter_and_keeps_strict_floats(name: str, function: Any) -> None:
    assert function.targetoptions["nogil"] is True, name
    assert function.targetoptions["fastmath"] is False, name


def start(folder: Path, cache: Path, **env: str) -> subprocess.Popen[str]:
    (folder / "tiny.py").write_text(TINY)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **env}
    command = [sys.executable, "-c", "import tiny"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_start_together_on_a_cold_cache_all_get_right_kernels(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    together = [start(tmp_path, cache) for _ in range(3)]
    for process in together:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out.strip()) == (0, DOUBLED), err
    stored = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert stored, "nothing was cached"
    out, err = start(tmp_path, cache).communicate(timeout=300)
    assert out.strip() == DOUBLED, err
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")} == stored, "a warm start compiled again"


def test_a_folder_that_cannot_be_written_costs_the_cache_but_not_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    out, err = start(tmp_path, blocked, XDG_CACHE_HOME=str(blocked)).communicate(timeout=300)
    assert out.strip() == DOUBLED, err
    assert "kernel cache off" in err


def test_a_user_without_a_home_has_no_folder_for_kernels_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And none that is named "~" in the current folder."""
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    without_home(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernel_cache._numba.config, "CACHE_DIR", str(blocked))
    assert kernel_cache.cache_folder.__wrapped__() is None
    assert list(tmp_path.iterdir()) == [blocked]


FAMILY = f"""
import sys
from psgc.codecs.jit.kernel import SCALAR_F32, helper, kernel

def multiplier(factor):
    @helper
    def times(x):
        {"x = x / factor * factor; " * 99}  # too long for LLVM to write out at both calls
        return x * factor

    @kernel(SCALAR_F32(SCALAR_F32))
    def run(x):
        return times(x) + times(x + x)

    return run

print([round(multiplier(float(factor))(1.0)) for factor in sys.argv[1:]])
"""


def test_kernels_of_one_source_that_different_processes_cached_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for factors, wanted in ((["2"], "[6]"), (["4"], "[12]"), (["2", "4"], "[6, 12]")):
        command = [sys.executable, "-c", "import family", *factors]
        assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout.strip() == wanted


def test_a_kernel_whose_helper_has_moved_to_another_module_is_made_again(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    helper_text = f"from psgc.codecs.jit.kernel import helper\n@helper\ndef times(x):\n    {'x = x / 3 * 3; ' * 99}\n    return 2 * x\n"
    before = None
    for place in ("first", "second"):
        if before is not None:
            before.unlink()
        before = tmp_path / f"{place}.py"
        before.write_text(helper_text)
        (tmp_path / "caller.py").write_text(
            f"from {place} import times\nfrom psgc.codecs.jit.kernel import SCALAR_F32, kernel\n"
            "@kernel(SCALAR_F32(SCALAR_F32))\ndef run(x):\n    return times(x) + times(x + x)\nprint(round(run(1.0)))\n"
        )
        command = [sys.executable, "-c", "import caller"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.stdout.strip() == "6", done.stderr


@kernel(SCALAR_F32(IN_F32, SCALAR_F32, OUT_F32))
def multiply_and_add(x: np.ndarray, factor: float, y: np.ndarray) -> float:
    for i in range(x.size):
        y[i] = y[i] + factor * x[i]
    return float(y[0])


def test_a_product_is_rounded_before_it_is_added() -> None:
    factor, x = np.float32(1 + 2**-12), np.full(64, 1 + 2**-12, np.float32)
    y = np.full(64, -(1 + 2**-11), np.float32)
    multiply_and_add(x, float(factor), y)
    assert (y == 0).all()  # fused, the result would be 2**-24


def test_views_read_and_write_at_any_alignment() -> None:
    memory = np.zeros(64, np.uint8)
    floats.FLOAT_KERNELS["float32"].finish(np.arange(5, dtype=np.float32), 1, 1, memory[3:])
    assert memory[7:27].tobytes() == np.arange(5, dtype=np.float32).tobytes()
    assert not memory[:7].any()
