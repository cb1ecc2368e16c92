"""Launching of kernels: what is compiled and when, and the errors if that is not possible. As on a GPU, in separate processes without the interpreter."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psgc.codecs.registry import parse_codec
from psgc.errors import DeviceError
from psgc.torch.device.cuda import CudaRuntime
from psgc.torch.device.faults import device_faults

ROOT = Path(__file__).parents[2]
# Triton's own launch, up to where it would compile: a new key is a new compilation.
LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

class Kernel:
    function = packed_metadata = None
    def launch_metadata(self, *arguments): return None
    def run(self, *arguments): launches.append(1)
    def __getitem__(self, grid):  # what it has been found by before
        launches.append(1)
        found.append(self)
        return lambda *arguments: passed.append(arguments)

def compiled(self, key, *rest):
    fresh.append(self.__name__)
    self.device_caches[0][0][key] = kernel = Kernel()
    return kernel

driver.set_active(Driver())
JITFunction._do_compile = compiled
fresh, launches, found, passed = [], [], [], []
from psgc.codecs.codec import Stream
from tests.cuda import tour
tour.TEXTS, tour.SCHEMES = TEXTS, SCHEMES
tour.tour()
print(len(fresh) > 100, len(launches) > len(fresh))
fresh.clear()
for numel, stream in ((20001, Stream(seed=9, step=16, rank=1, bucket=3, first=1 << 31)), (32768, Stream(seed=0, step=2, rank=0, bucket=1))):
    tour.NUMEL, tour.STREAM = numel, stream
    tour.tour()
print(sorted(set(fresh)))
"""
TEXTS = (
    "bf16", "int8:ef=0", "int4", "dithering:normalize=l2", "onebit", "onebit:ef=0,scale=unit", "topk:k=0.01", "topk:k=0.6", "topk:k=0.01,select=mstopk",
    "blocktopk", "randomk:ef=0",
)  # fmt: skip
SCHEMES = ("int8:momentum=nesterov,clip=1", "shared:ef=0")
WARMS = (
    LAUNCHES.split("from psgc.codecs.codec", maxsplit=1)[0]
    + """
from psgc.launch.job import gpu_warming, warming
names = [text for text in warming.everything() if text != warming.PLANNER] + ["int8/relay", "fp8/int4", "randomk:momentum=dgc,clip=1"]
print([text for text in names if not gpu_warming.warm(text, torch.device("cpu"))], len(fresh) > 100)
fresh.clear()
gpu_warming.SHAPES, gpu_warming.NUMEL = ((17, 20), (7,)), 347
for text in names:
    gpu_warming.warm(text, torch.device("cpu"))
print(sorted(set(fresh)))
"""
)
FINDS = (
    LAUNCHES.split("tour.TEXTS", maxsplit=1)[0]
    + """
from psgc.cuda.common import launching

def compare(kernel, programs, arguments, constants, num_warps):
    wanted.append(kernel[(programs,)](*arguments, num_warps=num_warps, **launching.SETTINGS, **constants))

def check(*arguments):
    found.clear(), wanted.clear()
    launching.launch(*arguments[:2], *arguments[2:-1], **arguments[-1])
    return not found or found[0] is wanted[0]

wanted = []
launching.observers.append(compare)
for numel in (20000, 20001):  # the second time all of them are found
    tour.NUMEL, tour.TEXTS, tour.SCHEMES = numel, TEXTS, SCHEMES
    found.clear(), wanted.clear()
    tour.tour()
    last = iter(wanted)
    print(len(found) > 100, all(any(kernel is one for one in last) for kernel in found))  # in order
from psgc.cuda.sparsify.scatter_kernels import correct_kernel
x, wrong = torch.zeros(4000), 0
rests = [(None, 0.5), (torch.ones(1), 0.0)]
for values in (x, x[1:], x[4:], x.bfloat16(), x.half()[1:]):
    for out in (x, x[3:]):
        for divisor in (1, 16, 2**31 - 1, 2**31, 3):
            for residual in (None, x, x[1:]):
                for at, rescale in rests:
                    for tile in (1024, 2048):
                        for _ in range(2):
                            wrong += not check(correct_kernel, 1, values, residual, divisor, at, rescale, out, 7, {"DIVIDES": divisor != 1, "TILE": tile})
print(wrong)
arguments = passed[-1]
print(arguments[0] == values.data_ptr(), arguments[5] == out.data_ptr(), arguments[6:])
"""
)
COMPILES = """
import logging
logging.basicConfig(format="%(message)s")
from psgc.cuda.common import launching
from tests.cuda import ahead
launch = ahead.Launch("psgc.cuda.common.sum_kernels", "sums_kernel", ("*fp64", "*fp64", "i32", "constexpr", "constexpr"), (((3,), 4096), ((4,), 12)), ())
ahead.compile_one(launch, 80), ahead.compile_one(launch, 90)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install -e '.[gpu-dev]'")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_other_lengths_steps_and_seeds_compile_nothing_anew() -> None:
    done = run(f"TEXTS, SCHEMES = {TEXTS!r}, {SCHEMES!r}\n{LAUNCHES}")
    assert done.stdout.splitlines() == ["True True", "[]"]


def test_a_launch_finds_the_compiled_kernel_that_triton_would_choose() -> None:
    done = run(f"TEXTS, SCHEMES = {TEXTS!r}, {SCHEMES!r}\n{FINDS}")
    assert done.stdout.splitlines() == ["True True", "True True", "0", "True True (7, True, 2048)"]


def test_psgc_warm_reaches_kernels_of_every_codec_and_scheme_and_other_lengths_then_compile_nothing() -> None:
    assert run(WARMS).stdout.splitlines() == ["[] True", "[]"]


def test_the_user_hears_once_that_kernels_are_compiled_and_nothing_where_triton_has_kept_them(tmp_path: Path) -> None:
    said = [run(COMPILES, TRITON_CACHE_DIR=str(tmp_path)).stderr for _ in range(2)]
    assert said[0].splitlines() == ["compiling GPU kernels, once on this machine: the first steps with a codec take some seconds longer"]
    assert said[1] == ""


class NoDriver:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_current_target(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Failed to find C compiler. Please"), r"^triton cannot be used \(RuntimeError: Failed .*\): install gcc, or name a C compiler in CC$"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), r"^triton's C compiler failed \(/usr/bin/gcc, status 1\): install Python's headers"),
        (ImportError("no triton"), r"^triton cannot be imported \(no triton\)"),
        (AssertionError("libcuda.so cannot found!\nPlease"), r"^triton cannot be used \(AssertionError: libcuda.so cannot found! Please\)$"),
    ],
)  # fmt: skip
def test_a_machine_on_which_triton_cannot_run_is_told_in_one_line_what_is_missing(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("triton.runtime", reason="triton is not installed: pip install -e '.[gpu-dev]'")
    from psgc.cuda.common.usable import why_not

    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=NoDriver(error)))
    why_not.cache_clear()
    found = why_not()
    why_not.cache_clear()
    assert re.search(said, found), found


def test_an_older_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[gpu-dev]'")
    from psgc.cuda.common.usable import why_not

    monkeypatch.setattr(triton, "__version__", "3.1.0")
    why_not.cache_clear()
    found = why_not()
    why_not.cache_clear()
    assert found == "triton is 3.1.0; 3.6 or newer expected: install a newer torch"


def test_where_kernels_cannot_run_the_cpu_encodes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from psgc.cuda.common import usable

    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime.device = torch.device("cuda", 1)
    monkeypatch.setattr(usable, "why_not", lambda: "no C compiler: install gcc")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with caplog.at_level(logging.WARNING):
        assert runtime.codec(parse_codec("int8")) is None
        assert runtime.codec(parse_codec("onebit")) is None
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:1: gradients are encoded on the CPU, because kernels cannot run on this GPU: no C compiler: install gcc"
    ]


def test_a_kernel_that_cannot_be_compiled_is_one_line_that_names_the_device() -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed: pip install -e '.[gpu-dev]'")
    for error in (errors.OutOfResources(300000, 232448, "shared memory"), errors.PTXASError("ptxas died\nwith status 9")):
        said = rf"^cuda:1: a kernel cannot be compiled or started \({type(error).__name__}: .*\); set PSGC_GPU_CODECS=0"
        with pytest.raises(DeviceError, match=said), device_faults("cuda:1"):
            raise error


def test_no_helper_of_a_kernel_returns_none_which_triton_3_6_does_not_compile() -> None:
    returns = []
    for path in sorted((ROOT / "cuda").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or "triton.jit" not in " ".join(map(ast.unparse, function.decorator_list)):
                continue
            for each in ast.walk(function):
                if isinstance(each, ast.Return) and (
                    each.value is None or ast.unparse(each.value).endswith("None") or " is None " in ast.unparse(each.value)
                ):
                    returns.append(f"{path.name}: {function.name}: {ast.unparse(each)}")
    assert returns == []
