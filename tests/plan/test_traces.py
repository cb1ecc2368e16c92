"""Profiles from traces of ordinary trainings: of torch.profiler (real ones, and ones with a GPU's events), and of Nsight Systems."""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psgc.errors import UsageError
from psgc.plan.inputs import observed
from psgc.plan.inputs.profile import Profile, load_profile
from psgc.plan.inputs.recorded import profile_of_file
from tests.cases import for_each
from tests.plan.commands import psgc

Event = dict[str, Any]
HOOK = "hook of "


def recorded(path: Path, *, steps: int = 9, passes: int = 1, shapes: bool = True, optimizer: bool = True) -> None:
    """Train under torch.profiler, and export the trace, in which each gradient's hook leaves an event of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 700), nn.LayerNorm(700), nn.Linear(700, 40))
    sgd = torch.optim.SGD(model.parameters(), 0.01)

    def mark(name: str) -> None:
        with torch.profiler.record_function(HOOK + name):
            pass

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(name))  # type: ignore[misc]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        for _ in range(steps):
            for _ in range(passes):
                model(torch.ones(8, 300)).square().sum().backward()
            if optimizer:
                sgd.step()
            sgd.zero_grad()
    profiler.export_chrome_trace(str(path))


# What a trace calls the gradients of this model: it has their shapes.
NAMES = {
    "0.weight": "500x300.0", "0.bias": "500.0", "2.weight": "700x500.0", "2.bias": "700.2", "3.weight": "700.0", "3.bias": "700.1",
    "4.weight": "40x700.0", "4.bias": "40.0",
}  # fmt: skip


def events_of(path: Path) -> list[Event]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def ready_by_hooks(events: list[Event], passes: int = 1) -> dict[str, list[float]]:
    """By tensor, the end of the event within which its hook ran, in the last backward pass of each step but the first."""
    accumulated = [event for event in events if event["name"] == "torch::autograd::AccumulateGrad"]
    ready: dict[str, list[float]] = {name: [] for name in NAMES}
    for hook in sorted((event for event in events if event["name"].startswith(HOOK)), key=start):
        (around,) = [
            event for event in accumulated if event["tid"] == hook["tid"] and start(event) <= start(hook) <= end(hook) <= end(event)
        ]
        ready[hook["name"].removeprefix(HOOK)].append(end(around))
    return {name: times[passes - 1 :: passes][1:] for name, times in ready.items()}


@pytest.mark.parametrize("passes", [1, 3])
def test_a_trace_of_torch_profiler_says_that_gradients_are_ready_when_their_hooks_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Each hook runs within the event whose end is the gradient's time, so however busy the machine is, the two are told of one moment. Of several passes
    before a step the last is what synchronization follows."""
    monkeypatch.setattr(observed, "_without_outliers", list)
    path = tmp_path / "trace.json"
    recorded(path, steps=5, passes=passes)
    found, events = profile_of_file(path), events_of(path)
    ready = ready_by_hooks(events, passes)
    assert {len(times) for times in ready.values()} == {4}
    first = [min(times) for times in zip(*ready.values(), strict=True)]
    expected = {name: statistics.median(at - began for at, began in zip(times, first, strict=True)) for name, times in ready.items()}
    named = {tensor.name: tensor.ready_us for tensor in found.tensors}
    assert set(named) == set(NAMES.values())
    for shape in {name.partition(".")[0] for name in named}:  # of gradients that have one shape, the trace does not say which is which
        of_trace = sorted(time_us for name, time_us in named.items() if name.partition(".")[0] == shape)
        of_hooks = sorted(expected[name] for name, called in NAMES.items() if called.partition(".")[0] == shape)
        assert of_trace == pytest.approx(of_hooks, abs=0.01), shape
    steps = sorted(start(event) for event in events if event["name"].startswith("Optimizer.step"))
    forward = statistics.median(at - began for at, began in zip(first, steps[:-1], strict=True))
    assert found.forward_us == pytest.approx(forward, abs=0.01), (
        "the passes before the last are computing before the first gradient that is sent"
    )
    assert {tensor.shape for tensor in found.tensors} == {(500, 300), (500,), (700, 500), (700,), (40, 700), (40,)}
    assert all(math.prod(tensor.shape or ()) == tensor.numel for tensor in found.tensors)
    assert not found.links


def start(event: Event) -> float:
    return float(event["ts"])


def end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def spans(name: str, category: str, start: float, lasts: float, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 7, "ts": start, "dur": lasts, "args": args}


def gpu_step(start: float, correlation: int) -> list[Event]:
    """Backward of two gradients on a GPU that is far behind the CPU, an all-reduce of both, and the optimizer's kernel, which waits for it."""
    gradient, backward, launch = (
        "torch::autograd::AccumulateGrad",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        "cudaLaunchKernel",
    )
    said = {"Collective name": "allreduce", "In msg nelems": 1_010_000, "dtype": "Float", "Group size": 4}
    first, second, reduce, update = (correlation + number for number in range(4))
    return [
        spans("aten::mm", "cpu_op", start - 50, 5),
        spans(launch, "cuda_runtime", start, 2, correlation=first),
        spans(backward, "cpu_op", start + 4, 4), spans(gradient, "cpu_op", start + 5, 1, **{"Input Dims": [[10_000]]}),
        spans(launch, "cuda_runtime", start + 10, 2, correlation=second),
        spans(backward, "cpu_op", start + 14, 9), spans(gradient, "cpu_op", start + 15, 1, **{"Input Dims": [[1000, 1000]]}),
        spans(launch, "cuda_runtime", start + 20, 2, correlation=reduce),
        spans("Optimizer.step#SGD.step", "user_annotation", start + 30, 10),
        spans(launch, "cuda_runtime", start + 32, 2, correlation=update),
        spans("gemm_a", "kernel", start + 100, 300, correlation=first),
        spans("gemm_b", "kernel", start + 400, 700, correlation=second),
        spans("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", start + 1100, 606, correlation=reduce, **said),
        spans("sgd", "kernel", start + 1706, 94, correlation=update),
    ]  # fmt: skip


def written(path: Path, events: list[Event], gpu: str = "NVIDIA H200") -> Path:
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": gpu}], "traceEvents": events}))
    return path


def test_on_a_gpu_a_gradient_is_ready_when_its_kernel_has_ended_and_nccl_tells_the_link(tmp_path: Path) -> None:
    events = [event for step in range(6) for event in gpu_step(1e4 * step, 10 * step + 1)]
    found = profile_of_file(written(tmp_path / "trace.json", events))
    # gemm_a ends at 400 and gemm_b at 1100, 700 us later; the CPU was there 10 us apart.
    assert [(tensor.name, tensor.ready_us, tensor.shape) for tensor in found.tensors] == [
        ("10000.0", 0.0, (10_000,)), ("1000x1000.0", 700.0, (1000, 1000)),
    ]  # fmt: skip
    # The optimizer's kernel begins at 1706; the next step's first gradient is there at 10400.
    assert found.forward_us == pytest.approx(10_400 - 1706)
    assert found.spread["tail_us"].median == pytest.approx(1706 - 1100)
    # A ring of 4 moves 2 * 3/4 * 4.04 MB = 6.06 MB over a link, in 606 us: 80 Gbit/s.
    assert found.links["collectives"].gbps == pytest.approx(80)
    assert found.hardware == "NVIDIA H200"


def test_a_links_latency_is_what_small_collectives_take_beyond_their_bytes(tmp_path: Path) -> None:
    """1 KB among 4 takes 120 us at 80 Gbit/s: 1.5 KB in 0.15 us, so 119.85 us are 6 messages' latency."""
    small = {"Collective name": "allreduce", "In msg nelems": 500, "dtype": "BFloat16", "Group size": 4}
    events = [event for step in range(6) for event in gpu_step(1e4 * step, 10 * step + 1)]
    events += [
        spans("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 1e4 * step + 5000, 120, correlation=900 + step, **small)
        for step in range(6)
    ]
    link = profile_of_file(written(tmp_path / "trace.json", events)).links["collectives"]
    assert link.gbps == pytest.approx(80)
    assert link.latency_us == pytest.approx((120 - 0.15) / 6)


def nsight_export(path: Path, steps: int = 6) -> Path:
    """The tables that are read, with the columns that `nsys export` gives them."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript("""
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER, shortName INTEGER);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce'), (3, 'Optimizer.step#SGD.step, op_id = 9');
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-SXM4-80GB');
        """)
        process, thread = 5 << 24, (5 << 24) + 77
        for event in (event for step in range(steps) for event in gpu_step(1e4 * step, 10 * step + 1)):
            start, end, category = int(event["ts"] * 1e3), int((event["ts"] + event["dur"]) * 1e3), event["cat"]
            if category == "kernel":
                name = 2 if event["name"].startswith("nccl") else 1
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)",
                    (start, end, event["args"]["correlation"], process, name),
                )
                # Another process's kernel may have the same correlation.
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", (0, 10**12, event["args"]["correlation"], 6 << 24, 1)
                )
            elif category == "cuda_runtime":
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", (start, end, thread, event["args"]["correlation"])
                )
            elif category == "user_annotation":
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, 3, ?)", (start, end, thread))
            else:
                sizes = f", sizes = [{event['args']['Input Dims'][0]}]" if event["args"] else ""
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)", (start, end, f"{event['name']}, op_id = 4{sizes}", thread)
                )
        database.commit()
    return path


def test_an_export_of_nsight_systems_gives_the_same_times(tmp_path: Path) -> None:
    events = [event for step in range(6) for event in gpu_step(1e4 * step, 10 * step + 1)]
    wanted = profile_of_file(written(tmp_path / "trace.json", events))
    found = profile_of_file(nsight_export(tmp_path / "trace.sqlite"))
    assert found.tensors == wanted.tensors
    assert (found.forward_us, found.spread) == (wanted.forward_us, wanted.spread)
    assert (found.hardware, found.links) == ("NVIDIA A100-SXM4-80GB", {})


def no_optimizer(path: Path) -> None:
    recorded(path, steps=4, optimizer=False)


def no_shapes(path: Path) -> None:
    recorded(path, steps=4, shapes=False)


def three_steps(path: Path) -> None:
    recorded(path, steps=3)


def cut_short(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-6])


def empty_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
        database.commit()


def broken_database(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + bytes(5000))


@for_each(wrong=[
    (no_optimizer, "no optimizer step: it has no event"), (no_shapes, r"profile whole iterations with record_shapes=True"),
    (three_steps, r"2 whole iterations in it, expected at least 3: profile 4 steps or more"), (cut_short, "not a trace of torch.profiler"),
    (lambda path: path.write_text("[1, 2"), "not a trace of torch.profiler"), (lambda path: path.write_text('{"a": 1}'), 'no list "traceEvents"'),
    (lambda path: path.write_text('{"traceEvents": [1, {"ph": "X", "ts": "x"}]}'), "no gradients: it has no event"),
    (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not a trace of torch.profiler"), (empty_database, "no NVTX ranges in it"),
    (broken_database, "not an SQLite export of Nsight Systems"), (lambda path: None, "No such file or directory"),
])  # fmt: skip
def test_what_is_no_such_trace_or_lacks_something_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, wrong: tuple[Callable[[Path], Any], str]
) -> None:
    make, said = wrong
    path = tmp_path_factory.mktemp("wrong") / "trace"
    make(path)
    with pytest.raises(UsageError, match=said) as caught:
        profile_of_file(path)
    assert "\n" not in str(caught.value)


def test_advise_answers_from_one_ordinary_trace(tmp_path: Path) -> None:
    trace, profile = tmp_path / "trace.json.gz", tmp_path / "profile.json"
    events = [event for step in range(6) for event in gpu_step(1e4 * step, 10 * step + 1)]
    trace.write_bytes(gzip.compress(written(tmp_path / "plain", events).read_bytes()))
    done = psgc("profile", "--trace", str(trace), "-o", str(profile))
    assert done.returncode == 0, done.stderr
    found: Profile = load_profile(str(profile))
    assert [tensor.shape for tensor in found.tensors] == [(10_000,), (1000, 1000)]
    advised = psgc("advise", "--profile", str(profile), "--gpu", "h200", "--nodes", "4", "--gpus-per-node", "1", "--link", "1", "--json")
    assert advised.returncode == 0, advised.stderr
    assert json.loads(advised.stdout)["candidates"]
    both = psgc("profile", "--trace", str(trace), "--model", "gpt2")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    assert "--trace contains times of its own" in both.stderr


def test_a_shape_in_a_profile_must_be_its_numels(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for shape, fits in (([2, 3], True), ([], False), ([2, 2], False), ([6.0], False), ("6", False), ([-2, -3], False), (None, True)):
        path.write_text(json.dumps({"version": 1, "tensors": [{"name": "a", "numel": 6, "ready_us": 0, "shape": shape}]}))
        if fits:
            assert load_profile(str(path)).tensors[0].shape == (None if shape is None else tuple(shape))
        else:
            with pytest.raises(UsageError, match=r"tensors\[0\]: shape of 'a' is .*expected sizes whose product is its numel, 6"):
                load_profile(str(path))
