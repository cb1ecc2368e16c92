"""The messages to the user while kernels are compiled, and compilation ahead of use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from psgc.codecs.jit.kernel import I64, kernel
from psgc.codecs.jit.kernel_cache import cache_folder
from psgc.cuda.common import usable
from psgc.diagnostics import compiling
from psgc.diagnostics.compiling import observed_by
from psgc.errors import DeviceError
from psgc.launch.job import warming
from tests.homes import without_home
from tests.plan.commands import psgc

SIGNATURE = I64(I64)
BEFORE = "all kernels of 1 codec were compiled before\n"


class Told:
    def __init__(self) -> None:
        self.words: list[str] = []

    def begins(self) -> None:
        self.words.append("begins")

    def ends(self) -> None:
        self.words.append("ends")


def doubled(x: int) -> int:
    return 2 * x


def test_a_kernel_is_told_of_once_with_its_helpers_and_not_when_it_comes_from_the_cache() -> None:
    told, number = Told(), int.from_bytes(os.urandom(6), "little")  # one that no run before has compiled
    inner = numba.njit(lambda x: x + number)

    def fresh() -> Any:
        return kernel(SIGNATURE)(lambda x: inner(x) * 2)

    with observed_by(told):
        assert fresh()(3) == 2 * (3 + number)
        assert told.words == ["begins", "ends"]
        kernel(SIGNATURE)(doubled)
        told.words.clear()
        assert kernel(SIGNATURE)(doubled)(3) == 6
        assert not told.words


def test_what_a_training_script_compiles_for_itself_is_not_told_of() -> None:
    told = Told()
    with observed_by(told):
        assert numba.njit(SIGNATURE)(lambda x: x - 1)(3) == 2
    assert not told.words


def test_of_the_processes_of_a_terminal_one_says_that_kernels_are_compiled(tmp_path: Path) -> None:
    """Two at once, on a machine that has compiled nothing; a kernel of this test's, for a codec's take long."""
    code = (
        "import sys, time; from psgc.codecs.jit.kernel import I64, kernel\n"
        "for n in range(3): kernel(I64(I64))(lambda x: x + n)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PSGC_OUTLET": f"test of {os.getpid()}"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    said = "".join(process.communicate("")[1] for process in both)
    assert said == "compiling kernels, once on this machine: some 10 s for each codec; `psgc warm` does it ahead of a job\n"


def keep_all_kernels_but(begins: tuple[str, ...], folder: Path) -> None:
    """A folder of kernels from which these are missing: others would take long to compile."""
    warming.warm(["none"], quiet=True)
    kept = cache_folder()
    assert kept is not None
    folder.mkdir(parents=True)
    for path in kept.glob("*.nbc"):
        if not path.name.startswith(begins):
            (folder / path.name).symlink_to(path)


def test_warm_compiles_ahead_says_so_and_finds_it_done_the_next_time(launched: Any, tmp_path: Path) -> None:
    cold = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "XDG_CACHE_HOME": str(tmp_path / "none")}
    keep_all_kernels_but(
        ("psgc.codecs.common.floats._finish_f32-", "psgc.codecs.common.floats._fold_f32-"), tmp_path / "kernels" / "psgc-kernels"
    )
    status, out, err = launched.end(launched.psgc("warm", "--codec", "none", "--json", **cold))
    assert (status, err) == (0, "")
    (done,) = json.loads(out)
    assert (done["codec"], done["compiled"]) == ("none", 2)
    popen = launched.psgc("warm", "--codec", "none", **cold)
    assert popen.stderr is not None
    first = popen.stderr.readline()
    assert first == "psgc warm: compiling the kernels of none: some 10 s for each that has not been compiled here\n"
    status, out, err = launched.end(popen)
    assert (status, err) == (0, "psgc warm: none: was compiled before\n")
    assert out in (BEFORE, f"{BEFORE}no kernels were compiled for GPUs: torch finds no GPU here\n"), "as there is a GPU or none"
    code = "import json, sys; from psgc.launch.job.warming import is_warm, prepare; prepare([]); print(is_warm('none'), 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **cold}, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n", "a launcher sees it without loading the compiler"


def test_a_user_without_a_home_has_kernels_beside_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    assert not warming.is_warm("a codec that nobody has compiled")
    assert [folder.is_relative_to(warming._CODECS) for folder in warming._folders()] == [True]


def test_a_home_that_may_not_be_entered_has_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container that is run by another user than it was made for. A name that is too long stands in for the missing right, which root has."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"/{'x' * 300}")
    assert not warming.is_warm("a codec that nobody has compiled")
    assert [warming._can_be_made(folder) for folder in warming._folders()][1] == os.access("/", os.W_OK), "of what is there above it"


def test_a_codec_that_is_none_is_one_line(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("warm", "--codec", "onebitt"))
    assert (status, out) == (2, "")
    assert re.fullmatch(r"psgc: unknown codec 'onebitt'.*\n", err)


def test_another_processor_version_or_source_has_a_mark_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {warming._mark("int8"), warming._mark("int4"), warming._mark("int8:rotate=1")}
    monkeypatch.setattr(warming, "_state", lambda: "another")
    assert len(marks | {warming._mark("int8")}) == 4


def test_verbs_that_run_no_codec_compile_none() -> None:
    code = (
        "import sys; from psgc.codecs.jit import kernel_cache; made = []; begin = kernel_cache.KernelCache.__init__\n"
        "kernel_cache.KernelCache.__init__ = lambda self, function, options: (made.append(function.__module__), begin(self, function, options))[1]\n"
        "from psgc.launch.cli import main\n"
        "for verb in sys.argv[1:]:\n"
        "    if verb.startswith('advise'): from psgc.plan.methods import search; search.ANNEALING = search.QUICK  # a short plan is not asked for\n"
        "    sys.argv = ['psgc', *verb.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, verb\n"
        "    print('loaded:', sorted(set(made)), file=sys.stderr)"
    )
    verbs = (
        "codecs", "codecs --json", "advise --model gpt2 --gpu a100 --nodes 4 --link 10",
        "whatif --profile resnet50 --cluster espresso-pcie --codec onebit",
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *verbs], capture_output=True, text=True, check=True)
    loaded = [line for line in done.stderr.splitlines() if line.startswith("loaded: ")]
    assert [("psgc.codecs" in line, "psgc.plan" in line) for line in loaded] == [(False, False)] * 2 + [(False, True)] * 2, (
        "what is called is compiled"
    )


def test_warming_everything_reaches_the_planners_kernels_and_tells_of_each_where_no_bar_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        done = warming.warm([warming.PLANNER, "none"], quiet=False)
    assert [one["codec"] for one in done] == [warming.PLANNER, "none"] and "psgc.plan.local_search.descent" in sys.modules
    said = capsys.readouterr().err.splitlines()[3:]
    assert said == [
        "psgc warm: compiling the kernels of the planner, none: some 10 s for each that has not been compiled here",
        "psgc warm: the planner: was compiled before", "psgc warm: none: was compiled before",
    ]  # fmt: skip


def test_kernels_for_the_gpus_of_a_machine_are_compiled_for_each_codec_and_each_generation_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And counted, without the message that a job has about them."""
    asked: list[tuple[str, str]] = []

    def load(text: str, device: torch.device) -> None:
        asked.append((text, str(device)))
        compiling.gpu_kernel_compiled()

    capabilities = [(8, 0), (9, 0), (8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(usable, "why_not", lambda: "")
    monkeypatch.setattr(warming, "_load_on_gpu", load)
    monkeypatch.setattr(compiling, "_gpu_voice", [])
    devices, lacking = warming.gpus()
    assert (list(map(str, devices)), lacking) == (["cuda:0", "cuda:1"], "")
    done = warming.warm([warming.PLANNER, "none"], quiet=True, devices=devices)
    assert asked == [("none", "cuda:0"), ("none", "cuda:1")]
    assert [(one["codec"], one["for_gpus"]) for one in done] == [(warming.PLANNER, 0), ("none", 2)] and done[1]["compiled"] >= 2
    assert compiling._gpu_voice == [] and capsys.readouterr().err == ""


def test_a_machine_whose_gpu_takes_no_kernels_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(usable, "why_not", lambda: "no C compiler: install gcc")
    monkeypatch.setattr(warming, "warm", lambda texts, quiet, devices: [{"codec": "none", "compiled": 0, "for_gpus": 0, "seconds": 0.0}])
    done = psgc("warm", "--codec", "none")
    assert (done.returncode, done.stdout) == (0, f"{BEFORE}no kernels were compiled for GPUs: no C compiler: install gcc\n")


def test_a_gpu_that_fails_while_kernels_are_compiled_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.launch.job import gpu_warming as on_gpu

    def lost(text: str, device: torch.device) -> bool:
        raise RuntimeError("CUDA error: device unavailable")

    monkeypatch.setattr(on_gpu, "warm", lost)
    with pytest.raises(DeviceError, match=r"^cuda:1 has been lost"):
        warming._load_on_gpu("int8", torch.device("cuda", 1))
