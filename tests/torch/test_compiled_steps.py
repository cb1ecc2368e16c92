"""Steps in a function that torch.compile has compiled: what psgc does within them is left alone, and everything else is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.torch.session.uncompiled import uncompiled
from tests.torch.job_compiled import FRONTS, made


@pytest.mark.timeout(600)
def test_compiled_steps_end_with_the_weights_of_others(make_job: Callable[..., Any]) -> None:
    for said in make_job(servers=1, hang_s=500, env={"PSGC_MIN_COMPRESS_BYTES": "0"}).said(
        job=str(Path(__file__).parent / "job_compiled.py")
    ):
        lines = [line for line in said.splitlines() if line.endswith((": the same", ": others"))]
        assert lines == [f"{front}: the same" for front in FRONTS], said


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """Those that were compiled."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_function_is_left_alone_with_all_that_it_calls(graphs: list[Any], older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by what is compiled, and by torch within that. older: a torch that lacks what the marks are made of."""
    if older:
        monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    traced: list[bool] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return (x + 1) * 2

    @uncompiled
    def left_alone(x: torch.Tensor) -> torch.Tensor:
        return called(x).detach()

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = left_alone(x * 3)
        (y * w).sum().backward()
        return y

    w = torch.ones(2, requires_grad=True)
    w.register_hook(left_alone)
    assert step(torch.ones(2), w).tolist() == [8.0, 8.0]
    assert w.grad is not None and w.grad.tolist() == [18.0, 18.0], "8, and the hook's result of that"
    assert traced == [False, False]
    assert len(graphs) == 2, "what comes before it, and what comes after it until backward"


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapped_model_without_buffers_is_compiled_in_one_piece(graphs: list[Any]) -> None:
    model = psgc.DistributedDataParallel(made())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(4, 5)).sum().backward()


def test_importing_psgc_imports_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", "import psgc.torch, sys; assert 'torch._dynamo' not in sys.modules"], check=True, timeout=250)
