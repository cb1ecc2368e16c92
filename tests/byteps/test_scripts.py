"""Scripts written for BytePS, in the shape of its tutorials, run over real processes without a change: they import ``byteps.torch`` alone."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.job.as_byteps import FOLDER, found_as_byteps
from tests.conftest import Job, free_port
from tests.launch.conftest import Launched, launched

__all__ = ["launched"]
SCRIPTS = Path(__file__).parent / "scripts"


def run(launched: Launched, script: str, *arguments: str, flags: tuple[str, ...] = (), **env: str) -> list[str]:
    """The sorted lines of a job of two workers, each of which imports psgc under BytePS's name."""
    command = ("run", "--no-prefix", "--as-byteps", *flags, "--", sys.executable, str(SCRIPTS / script), *arguments)
    status, out, err = launched.end(launched.psgc(*command, PSGC_SILENCE_S="60", **env))
    assert status == 0, err
    return sorted(str(out).splitlines())


def same_on_all_ranks(lines: list[str], ranks: int = 2) -> str:
    """What every rank's line says after its rank."""
    said = [line.split(" ", 2)[2] for line in lines if line.startswith("rank ")]
    assert len(said) == ranks and len(set(said)) == 1, lines
    return said[0]


def test_no_script_knows_psgc() -> None:
    for script in SCRIPTS.glob("*.py"):
        assert "psgc" not in script.read_text(), script.name


def test_the_benchmark(launched: Launched) -> None:
    lines = run(launched, "synthetic_benchmark.py", "--fp16-pushpull")
    assert same_on_all_ranks(lines).startswith("steps 5 ")
    assert "Number of CPUs: 2" in lines


def test_the_training_of_digits(launched: Launched) -> None:
    accuracies = [float(found[1]) for line in run(launched, "train_mnist.py") if (found := re.search(r"Accuracy: (.*)%", line))]
    assert len(accuracies) == 2 and max(accuracies) > 50, accuracies


def test_resnet_50_goes_on_from_its_checkpoint(launched: Launched, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-format", str(tmp_path / "{epoch}.pth"))
    first = run(launched, "train_imagenet.py", "--epochs", "1", *checkpoints)
    assert same_on_all_ranks(first).startswith("from epoch 0: ")
    assert any("161 parameters" in line for line in first)
    assert same_on_all_ranks(run(launched, "train_imagenet.py", *checkpoints)).startswith("from epoch 1: ")


def test_the_benchmark_without_a_barrier(launched: Launched) -> None:
    lines = run(launched, "cross_barrier_benchmark.py", "--fp16-allreduce", "--adam")
    assert same_on_all_ranks(lines).startswith("steps 6 ")
    assert lines[0].startswith("Iter #0: ")


def test_a_model_under_distributed_data_parallel(launched: Launched) -> None:
    assert same_on_all_ranks(run(launched, "ddp_benchmark.py")).startswith("trained ")


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.long), pytest.param((3, 1), marks=pytest.mark.long)])
def test_the_benchmark_that_suspends_and_resumes_with_another_number_of_workers(
    make_job: Callable[..., Job], sizes: tuple[int, int], tmp_path: Path
) -> None:
    """The new scheduler and server are started at the old ones' address once these have ended, as an operator of BytePS does."""
    before, after = sizes
    barrier = tmp_path / "barrier"
    job = make_job(nodes=before, env=found_as_byteps(os.environ))
    command = [sys.executable, str(SCRIPTS / "elastic_benchmark.py"), "--barrier", str(barrier), "--resume-workers", str(after)]
    services = [job.scheduler(), job.server()]
    workers = [job.start(f"worker {node}", command, DMLC_ROLE="worker", DMLC_WORKER_ID=str(node)) for node in range(before)]
    assert [service.end() for service in services] == [0, 0], job.text()
    again = {"DMLC_NUM_WORKER": str(after)}
    services = [job.scheduler(**again), job.server(**again)]
    barrier.touch()
    assert [process.end() for process in (*workers, *services)] == [0] * (before + 2), job.text()
    sums = []
    for size, steps in ((before, 4), (after, 8)):
        line = re.compile(rf"^rank (\d) of {size}: steps {steps} sum (\S+)$", re.MULTILINE)
        said = dict(found for worker in workers for found in line.findall(worker.text))
        assert sorted(said) == [str(rank) for rank in range(size)] and len(set(said.values())) == 1, job.text()
        sums.append(said["0"])
    assert sums[0] != sums[1]
    for node, worker in enumerate(workers):
        assert f"suspended: rank {node} of {before}, 0 of 1 here" in worker.text


def test_a_script_that_ends_after_resume_is_not_said_to_have_synchronised_nothing(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """As BytePS's own example ends."""
    job = make_job(nodes=1, env=found_as_byteps(os.environ))
    barrier = tmp_path / "barrier"
    services = [job.scheduler(), job.server()]
    arguments = ("--barrier", str(barrier), "--stop")
    worker = job.start(
        "worker", [sys.executable, str(SCRIPTS / "elastic_benchmark.py"), *arguments], DMLC_ROLE="worker", DMLC_WORKER_ID="0"
    )
    assert [service.end() for service in services] == [0, 0], job.text()
    services = [job.scheduler(), job.server()]
    barrier.touch()
    assert [process.end() for process in (worker, *services)] == [0, 0, 0], job.text()
    assert "bps is resumed." in worker.text and "synchronised nothing" not in worker.text


@pytest.mark.parametrize("launcher", [False, True])
def test_a_scheduler_and_servers_do_not_wait_for_a_suspended_worker_that_has_failed(
    make_job: Callable[..., Job], tmp_path: Path, launcher: bool
) -> None:
    """Nor do they if no launcher tells them."""
    job = make_job(nodes=1, env={**found_as_byteps(os.environ), "PSGC_REGISTER_TIMEOUT_S": "10000"})
    barrier = tmp_path / "barrier"
    services = [job.scheduler(), job.server()]
    script = [str(SCRIPTS / "elastic_benchmark.py"), "--barrier", str(barrier), "--fail"]
    launched_by = ["-c", "from psgc.launch.job.bpslaunch import main; main()", sys.executable] if launcher else []
    worker = job.start("worker", [sys.executable, *launched_by, *script], DMLC_ROLE="worker", DMLC_WORKER_ID="0")
    assert [service.end() for service in services] == [0, 0], job.text()
    services = [job.scheduler(DMLC_NUM_WORKER="2"), job.server(DMLC_NUM_WORKER="2")]
    services[0].read_until("here: .*server")  # one that came later would look for a scheduler that has ended
    barrier.touch()
    assert worker.end() == 1 and [service.end() for service in services] == [1, 1], job.text()
    for service in services:
        assert re.search(r"node 0 \(.*\): .* RuntimeError: no more images.*, before it joined the job", service.text), job.text()


@pytest.mark.parametrize(
    "tests", [("temporary_tensor", "initialised_already"), pytest.param((), marks=pytest.mark.long)], ids=["two", "all"]
)
def test_a_test_suite_whose_tests_each_have_a_job_in_one_process(launched: Launched, tmp_path: Path, tests: tuple[str, ...]) -> None:
    """In the shape of BytePS's own: scheduler and server are started anew for each, by bpslaunch, at the same address."""
    bpslaunch = tmp_path / "bpslaunch"
    bpslaunch.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from psgc.launch.job.bpslaunch import main; main()'\n")
    bpslaunch.chmod(0o755)
    env = found_as_byteps(os.environ) | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DMLC_PS_ROOT_PORT": str(free_port())}
    status, out, err = launched.end(
        launched.preloaded(str(SCRIPTS / "fixture.py"), *(f"-k{test}" for test in tests), **env, PSGC_SILENCE_S="60")
    )
    assert status == 0 and out.splitlines() == ["bps shutdown"] * (len(tests) or 3) and f"Ran {len(tests) or 3} tests" in err, err


def test_an_object_of_any_class_is_broadcast_if_the_environment_allows_pickles(launched: Launched) -> None:
    assert run(launched, "broadcast_options.py", PSGC_ALLOW_PICKLE="1") == ["rank 0 lr 0.1", "rank 1 lr 0.1"]
    command = ("run", "--as-byteps", "--", sys.executable, str(SCRIPTS / "broadcast_options.py"))
    status, _, err = launched.end(launched.psgc(*command, PSGC_STEP_TIMEOUT_S="10000"))
    assert status == 1
    assert re.search(
        r"psgc run: rank \d ended with UsageError: .*object is a argparse\.Namespace, which is not a plain type; .*PSGC_ALLOW_PICKLE=1", err
    )


def test_a_training_with_a_compressor_class_of_its_own(launched: Launched) -> None:
    assert same_on_all_ranks(run(launched, "own_compressor.py")).startswith("sum ")


def test_the_microbenchmark_under_psgc_launch(launched: Launched) -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "0,1", "DMLC_NUM_WORKER": "1", "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0", "PSGC_SILENCE_S": "60"}
    status, out, err = launched.end(launched.psgc_launch("--as-byteps", sys.executable, str(SCRIPTS / "microbenchmark.py"), **env))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"[worker {rank}] rank {rank} of 2: right" for rank in range(2)]


@pytest.fixture
def byteps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, in this process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import byteps.torch

    yield byteps
    for name in [name for name in sys.modules if name.partition(".")[0] == "byteps"]:
        del sys.modules[name]


MODULES = ("torch", "torch.ops", "torch.compression", "torch.cross_barrier", "torch.parallel", "torch.parallel.distributed")
OWN_NAMES = {
    "byteps_push_pull": "push_pull_async_inplace", "byteps_push_pull_group": "push_pull_group_sync_inplace",
    "byteps_torch_set_num_grads": "set_num_grads",
}  # fmt: skip
BYTEPS_ALONE = {"Compressor", "NoneCompressor", "FP16Compressor"}


def test_bytepss_compressors_are_codecs(byteps: Any) -> None:
    from byteps.torch.compression import FP16Compressor, NoneCompressor

    from psgc.torch.tensors.codec_text import codec_text

    assert [codec_text(each, "float32") for each in (NoneCompressor, FP16Compressor)] == ["none", "fp16"]


def test_its_version_is_bytepss_last_with_psgcs_beside_it(byteps: Any) -> None:
    import psgc

    assert (byteps.__version__, byteps.psgc_version) == ("0.2.5", psgc.__version__)


def test_extensions_are_asked_for_in_vain_for_other_frameworks_alone(byteps: Any) -> None:
    from byteps.common import check_extension, get_ext_suffix, get_extension_full_path

    assert get_ext_suffix().endswith(".so")
    assert get_extension_full_path("/a/byteps/torch/__init__.py", "c_lib") == f"/a/byteps/torch/c_lib{get_ext_suffix()}"
    check_extension("byteps.torch", "BYTEPS_WITH_PYTORCH", __file__, "c_lib")
    with pytest.raises(ImportError, match=r"byteps\.mxnet is not there: psgc, under BytePS's name, is for PyTorch alone"):
        check_extension("byteps.mxnet", "BYTEPS_WITH_MXNET", __file__, "c_lib")


def test_every_name_is_psgcs_own(byteps: Any) -> None:
    import psgc.torch

    for name in MODULES:
        module = importlib.import_module(f"byteps.{name}")
        for offered in set(module.__all__) - BYTEPS_ALONE:
            assert getattr(module, offered) is getattr(psgc.torch, OWN_NAMES.get(offered, offered)), (name, offered)


def test_a_training_of_16_bit_copies_is_refused_with_what_to_use_instead(byteps: Any) -> None:
    import torch
    from byteps.misc import imagenet18

    from psgc.errors import UsageError

    with pytest.raises(UsageError, match=r"half=True is not offered; .*GradScaler"):
        imagenet18.DistributedOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), half=True)


def test_the_folder_comes_first_and_once() -> None:
    once = found_as_byteps({"PYTHONPATH": os.pathsep.join(["a", "b"])})
    assert once == {"PYTHONPATH": os.pathsep.join([str(FOLDER), "a", "b"])} == found_as_byteps(once)
