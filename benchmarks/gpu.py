"""Everything that only a GPU can show, in one command of less than 8 minutes and without network: `python benchmarks/gpu.py`, from a checkout.

Runs the tests of the kernels and of the device path on the GPU, `psgc bench kernels --device cuda`, jobs of two ranks that share the GPU through a server,
whose sums have to be those of the CPU path bit for bit (with PowerSGD, whose products are each device's own: those of the other rank), a GPT step with and
without the encode of each codec, and of schemes with a state, beside it, NCCL with one rank, and compute-sanitizer where it is there. Writes
docs/results/DEVICE.json, which `psgc codecs` and `psgc advise` cite.

Each step is a process of its own, so that neither an error that CUDA does not recover from nor a step that hangs reaches the others. A step has the time that
`LIMITS` gives it, and what steps before it have left; one that is cut off keeps what it had found. The document is written after each step. A step that
fails or is left out says why in it; if one failed, the command ends with status 1. `--dry-run` takes every step with the CPU in the GPU's place, at small
sizes, and writes nowhere but to --out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
JOB_CODECS = ("none", "int8", "onebit", "topk:k=0.1", "randomk:k=0.1", "int8/relay", "onebit:momentum=nesterov", "powersgd:rank=4")
JOBS_AT_ONCE = 6  # of a few processes each
EACH = {"PSGC_FUSE_BYTES": "0", "PSGC_MIN_COMPRESS_BYTES": "0"}  # a bucket for each tensor
STEPS_OF_JOB: Final = 12
TIMED_JOBS: Final = (
    ("none", "a bucket for each tensor", EACH),
    ("int8", "a bucket for each tensor", EACH),
    ("int8", "buckets as by default", {}),
)
OWN_PRODUCTS = ("powersgd",)  # each device has products of its own: ranks agree, but not with the CPU
STATE_CODECS = ("onebit:momentum=nesterov", "powersgd:rank=4")
STEP_CODECS = ("none", "bf16", "int8", "int4", "fp8", "onebit", "topk", "blocktopk", "randomk")
# The steps in order, and the seconds that each may take; together less than 8 minutes.
LIMITS: Final = {
    "machine": 40, "warm": 60, "tests": 110, "kernels": 60, "two_ranks": 105, "many_tensors": 20, "gpt": 50, "nccl": 15, "sanitizer": 15,
}  # fmt: skip
MODULES = ("numpy", "numba", "scipy", "zmq", "rich", "typer", "pytest", "triton")  # that steps import
USEFUL = ("xdist", "pytest_timeout", "hypothesis")
ENDING_S: Final = 3.0  # of a step's time, in which it ends what it has started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the document; default: docs/results/DEVICE.json")
    parser.add_argument("--dry-run", action="store_true", help="with the CPU in the GPU's place")
    parser.add_argument("--steps", default="", help="some of the steps, with commas between them; default: all")
    parser.add_argument("--step", nargs=3, metavar=("NAME", "SECONDS", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=3, metavar=("CODEC", "WHERE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return job(*options.job)
    if options.step:
        return step(*options.step, dry=options.dry_run)
    wanted = [name for name in options.steps.split(",") if name] or list(LIMITS)
    if unknown := [name for name in wanted if name not in LIMITS]:
        parser.error(f"--steps: no such step {', '.join(unknown)}; choose among {', '.join(LIMITS)}")
    if not options.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device on this machine; --dry-run tries the steps on the CPU", file=sys.stderr)
        return 2
    document: dict[str, Any] = {
        "version": 1,
        "device": "dry run" if options.dry_run else "",
        "date": time.strftime("%Y-%m-%d"),
        "dry_run": options.dry_run,
        "steps": {},
    }
    until, out = time.monotonic() + sum(LIMITS.values()), options.out
    for number, name in enumerate(wanted):
        later = sum(LIMITS[other] for other in wanted[number + 1 :])
        found = taken(name, min(until - time.monotonic() - later, 4.0 * LIMITS[name]), options.dry_run)
        document["steps"][name] = found
        document["device"] = document["device"] or found.get("device", "")
        print(f"{name}: {found.get('failed') or found.get('left_out') or 'done'} ({found['took_s']} s)", flush=True)
        if options.out is None and not options.dry_run:
            named = re.sub(r"[^a-z0-9]+", "-", document["device"].lower()).strip("-") or "unnamed"
            out = ROOT / "docs" / "results" / f"{named}.json"
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {out}" if out is not None else "written nowhere: a dry run without --out")
    return int(any("failed" in found for found in document["steps"].values()))


def taken(name: str, seconds: float, dry: bool) -> dict[str, Any]:
    """What a step finds, in a process of its own; what it had found before, if it fails or takes too long."""
    began = time.monotonic()
    print(f"{name}, at most {seconds:.0f} s ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [sys.executable, str(Path(__file__)), "--step", name, str(seconds), str(file), *(["--dry-run"] if dry else [])]
        done = ran(words, seconds, {}, aloud=True)
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if done.code is None:
        found["failed"] = f"it was not done after {seconds:.0f} s; what it had found until then is here"
    elif done.code and "failed" not in found:
        found["failed"] = f"its process ended with status {done.code}"
    found["took_s"] = round(time.monotonic() - began, 1)
    return found


class Done(NamedTuple):
    """A command that has ended. code: None if it took too long. said: stdout and stderr, unless it was aloud."""

    code: int | None
    said: str


def ran(words: list[str], seconds: float, env: dict[str, str], aloud: bool = False) -> Done:
    """Run a command with all that it starts for at most so long. aloud: what it says goes where ours goes."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # not a pipe, which a process that outlives the command would keep open
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=None if aloud else log, stderr=None if aloud else subprocess.STDOUT,
        )  # fmt: skip
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(max(1.0, seconds))
        for end in (signal.SIGTERM, signal.SIGKILL) if code is None else ():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        log.seek(0)
        return Done(code, log.read())


def begun(works: list[Callable[[], Any]], most: int) -> list[Callable[[], Any]]:
    """Begin them in threads, so many at a time; what waits for each, and gives its result. Not an executor, whose threads must not fork."""
    room, results = threading.Semaphore(most), dict[int, Any]()

    def one(number: int) -> None:
        with room:
            results[number] = works[number]()

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()

    def result(number: int) -> Any:
        threads[number].join()
        return results[number]

    return [lambda number=number: result(number) for number in range(len(works))]  # type: ignore[misc]


def step(name: str, seconds: str, file: str, dry: bool) -> int:
    """Take one step, in this process."""
    run = Run(dry, float(seconds) - ENDING_S, Path(file))
    try:
        found = STEPS[name](run)
    except Exception as error:  # the document still says what had been found
        traceback.print_exc()
        found = {**run.found, "failed": " ".join(f"{type(error).__name__}: {error}".split())[:2000]}
    run.keep(found)
    return int("failed" in found)


class Run:
    """Where a step runs. watch.device: where tensors are put."""

    def __init__(self, dry: bool, seconds: float, file: Path) -> None:
        self.dry, self.found, self._file, self._until = dry, dict[str, Any](), file, time.monotonic() + seconds
        self._watch: Any = None

    @property
    def watch(self) -> Any:
        from psgc.launch.bench.gpu_kernels import CudaStopwatch, HostStopwatch

        if self._watch is None:
            self._watch = HostStopwatch(_stand_in) if self.dry else CudaStopwatch()
        return self._watch

    @property
    def gpu(self) -> Any:
        return self.watch.device

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def keep(self, found: dict[str, Any]) -> None:
        """What has been found so far, should the step be cut off."""
        self.found = found
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(self._file)

    def command(self, *words: str, env: dict[str, str] | None = None) -> Done:
        """Run a command for at most the time that is left."""
        return ran(list(words), self.left_s, env or {})


def _stand_in(codec: Any) -> Any:
    """What runs in a GPU side's place in a dry run."""
    from tests.device.recording import CpuCodec

    class Side(CpuCodec):
        def moved_bytes(self, operation: str, numel: int, item_bytes: int = 4, payloads: int = 1) -> int:
            return numel * (item_bytes + payloads)

    return Side(codec)


def machine(run: Run) -> dict[str, Any]:
    """What the steps need, and whether it is there."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "c_compiler": shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang"),
        "missing": [name for name in (*MODULES, *USEFUL) if importlib.util.find_spec(name) is None],
    }
    print("  ", found, flush=True)
    run.keep(found)
    if run.dry:
        return found
    found["device"] = torch.cuda.get_device_name()
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability()),
        "gpus": torch.cuda.device_count(),
    }
    if shutil.which("nvidia-smi"):
        query = run.command("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv,noheader")
        found["nvidia_smi"] = query.said.strip().splitlines()[:1]
    run.keep(found)
    import triton

    from psgc.cuda.common.usable import why_not

    found["triton"] = triton.__version__
    if reason := why_not():
        return {**found, "failed": f"kernels cannot run here: {reason}"}
    if needed := [name for name in found["missing"] if name in MODULES]:
        return {**found, "failed": f"steps will fail that import {', '.join(needed)}: install them"}
    return found


def warm(run: Run) -> dict[str, Any]:
    """The CPU's kernels, which all steps compare with, compiled side by side."""
    from psgc.launch.job.warming import everything, is_warm

    cold = [name for name in (["int8"] if run.dry else everything()) if not is_warm(name)]
    words = (sys.executable, "-m", "psgc.launch", "warm", "--codec")
    done = [wait() for wait in begun([partial(run.command, *words, name) for name in cold], os.cpu_count() or 1)]
    wrong = {name: " ".join(each.said.split())[-500:] for name, each in zip(cold, done, strict=True) if each.code != 0}
    return {"compiled": cold, **({"failed": f"psgc warm: {wrong}"} if wrong else {})}


def tests(run: Run) -> dict[str, Any]:
    """The kernels against the CPU's bytes, and the device path, on this device."""
    # Compiling for other devices needs no GPU, and takes long.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short", "-rfE", "-m", "not long",
             "--ignore=tests/cuda/test_ahead.py", "-o", f"timeout={max(1, int(run.left_s))}"]  # fmt: skip
    if run.dry:
        words.append("--collect-only")
    elif importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling
        words += ["-n", str(min(14, os.cpu_count() or 1))]
    done = run.command(*words, "tests/cuda", "tests/device")
    last = (done.said.strip().splitlines() or [""])[-1]
    if done.code == 0:
        return {"collected" if run.dry else "ran": last}
    print(done.said[-8000:], flush=True)
    wrong = re.findall(r"^(?:FAILED|ERROR) .*", done.said, re.MULTILINE)
    return {
        "failed": last if done.code is not None else f"not done in time: {last}",
        "tests": [line[:400] for line in wrong],
        "tail": done.said[-6000:],
    }


def kernels(run: Run) -> dict[str, Any]:
    """Times of every codec; then, while there is time, of torch beside them."""
    from psgc.codecs import registered_codecs
    from psgc.launch.bench.gpu_kernels import bench_gpu_kernels

    sizes = [4096] if run.dry else [1 << 16, 1 << 20, 100_000_000]
    found: dict[str, Any] = {"device": run.watch.name, "copy_gbps": {}, "rows": [], "without": [], "left_out": {}, "wrong": {}}
    plain = tuple(["int8", "topk"] if run.dry else registered_codecs())
    beside = [("int8", ("torch",))] if run.dry else [(codec, (by,)) for by in ("torch", "torch.compile") for codec in plain]
    for codec, by in [*((codec, ()) for codec in plain), *beside]:
        if run.left_s < 6:
            found["left_out"][f"{codec} {' '.join(by)}".strip()] = "the time was over"
            continue
        try:
            one = bench_gpu_kernels(sizes, [codec], run.watch, lambda text: print("  ", text, flush=True), by)
        except Exception as error:  # of this codec; the others are measured
            found["wrong"][codec] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            continue
        found["copy_gbps"] |= one["copy_gbps"]
        found["rows"] += [row for row in one["rows"] if bool(by) == (row["implementation"] != "psgc")]
        found["without"] += [text for text in one["without"] if not by]
        found["left_out"] |= one["left_out"]
        run.keep(found)
    if found["wrong"]:
        found["failed"] = "; ".join(found["wrong"].values())
    return found


def sanitizer(run: Run) -> dict[str, Any]:
    """compute-sanitizer on the kernels' smallest cases."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"left_out": "compute-sanitizer is not on this machine's PATH", "skipped": 1}
    code = (
        "import torch; from psgc.codecs import parse_codec; from psgc.launch.bench.gpu_kernels import check_side\n"
        "from psgc.codecs.backends import device_codec\n"
        "device = torch.device('cuda')\n"
        f"for name in {STEP_CODECS!r}:\n"
        "    codec = parse_codec(name); side = device_codec(codec, device)\n"
        "    if side is not None:\n"
        "        for numel in (1, 4097): check_side(codec, side, device, numel)\n"
        "torch.cuda.synchronize()\n"
    )
    done = run.command(tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code)
    said = done.said
    if done.code is None:
        return {"left_out": f"compute-sanitizer was not done in time: {' '.join(said.split())[-300:]}", "skipped": 1}
    if done.code == 0 and "ERROR SUMMARY: 0 errors" in said:
        return {"ran": "memcheck: 0 errors"}
    if "ERROR SUMMARY" not in said or re.search(r"not supported|not permitted|insufficient permission|Unable to", said):
        return {"left_out": f"compute-sanitizer does not run here: {' '.join(said.split())[-300:]}", "skipped": 1}
    return {"failed": " ".join(said.split())[-2000:]}


def many_tensors(run: Run) -> dict[str, Any]:
    """300 small tensors in one launch, beside one tensor of as many elements: as long as the host takes, and what of that kernels run."""
    from psgc.codecs import Stream, parse_codec

    each, many = (64, 4) if run.dry else (10_000, 300)
    found: dict[str, Any] = {}
    for name in ("int8", "onebit", "topk", "topk:select=sampled", "blocktopk"):
        codec = parse_codec(name)
        side = run.watch.side(codec)
        if side is None or not hasattr(side, "encode_many"):
            found[name] = {"left_out": "no GPU side that encodes many"}
            continue
        from psgc.device.codec import Encoding

        def item(numel: int, codec: Any = codec, side: Any = side) -> Any:
            scratch = side.scratch_bytes(numel)
            return Encoding(
                torch.randn(numel, device=run.gpu), torch.randn(numel, device=run.gpu) if codec.feedback else None, 1.0, Stream(0, 1, 0, 0),
                torch.zeros(max(16, codec.payload_bound(numel)), dtype=torch.uint8, device=run.gpu),
                torch.zeros(2, dtype=torch.int64, device=run.gpu), torch.empty(scratch, dtype=torch.uint8, device=run.gpu) if scratch else None,
            )  # fmt: skip

        small, one = [item(each) for _ in range(many)], item(each * many)

        def encode_many(_: int = 0, side: Any = side, small: Any = small) -> None:
            side.encode_many(small)

        def encode(_: int = 0, side: Any = side, one: Any = one) -> None:
            side.encode(one.grad, one.residual, 1.0, one.stream, one.out, one.status, one.scratch)

        together, alone = run.watch.seconds(encode_many, 1), run.watch.seconds(encode, 1)
        on_gpu = {} if run.dry else {"many_on_gpu_s": _kernel_seconds(encode_many), "one_on_gpu_s": _kernel_seconds(encode)}
        found[name] = {"many_s": together, "one_s": alone, "ratio": round(together / alone, 3), **on_gpu}
        run.keep(found)
    return found


def _kernel_seconds(work: Callable[[], None]) -> float:
    """How long kernels and copies run on the GPU of one call."""
    from torch.profiler import ProfilerActivity, profile

    calls = 5
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in seen.key_averages()) / calls / 1e6


def gpt(run: Run) -> dict[str, Any]:
    """A step of a GPT of about 100 M parameters, alone and with each codec's encode of its gradients on a side stream, as psgc has it."""
    from torch import nn

    from psgc.codecs import Stream, parse_codec

    layers, width, length, batch = (1, 32, 8, 1) if run.dry else (12, 768, 1024, 8)
    block = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(20_000 if not run.dry else 50, width), nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    ).to(run.gpu)
    tokens = torch.randint(0, 50, (batch, length), device=run.gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    numel = sum(p.numel() for p in model.parameters())
    flat = torch.zeros(numel, device=run.gpu)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(run.gpu.type, torch.bfloat16):
            model(tokens).square().mean().backward()

    step()
    flat.copy_(torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None]))
    found: dict[str, Any] = {"parameters": numel, "codecs": {}}
    timed = _timer(run, step, optimizer)
    timed(None)
    for name in ("none", "int8") if run.dry else STEP_CODECS:
        codec = parse_codec(name)
        side = run.watch.side(codec)
        if run.left_s < 5:
            found["codecs"][name] = {"left_out": "the time was over"}
            continue
        if side is None:
            found["codecs"][name] = {"left_out": "no GPU side"}
            continue
        out = torch.zeros(codec.payload_bound(numel), dtype=torch.uint8, device=run.gpu)
        status, residual = torch.zeros(2, dtype=torch.int64, device=run.gpu), torch.zeros_like(flat) if codec.feedback else None
        scratch = torch.empty(side.scratch_bytes(numel), dtype=torch.uint8, device=run.gpu)

        def encode(
            side: Any = side, residual: Any = residual, out: Any = out, status: Any = status, scratch: Any = scratch, numel: int = numel
        ) -> None:
            side.encode(flat, residual, 1.0, Stream(0, 1, 0, 0), out, status, scratch)

        without, with_codec, again = (
            timed(None),
            timed(encode),
            timed(None),
        )  # in turns, so that a slow spell shows as a difference of the two without
        alone = (without + again) / 2
        found["codecs"][name] = {"without_s": [without, again], "with_s": with_codec, "added": round(with_codec / alone - 1, 5)}
        run.keep(found)
        del out, residual, scratch
    found["codecs"] |= _states(run, timed, numel, tuple(tuple(p.shape) for p in model.parameters()), flat)
    return found


def _timer(run: Run, step: Callable[[], None], optimizer: Any) -> Callable[[Callable[[], None] | None], float]:
    """What gives the median time of a step, with something encoded between backward and the optimizer on a stream beside them, or without."""
    side_stream = None if run.dry else torch.cuda.Stream(run.gpu)

    def timed(encode: Callable[[], None] | None) -> float:
        times = []
        for _ in range(3 if run.dry else 15):
            began = time.perf_counter()
            step()
            if encode is not None:
                if side_stream is None:
                    encode()
                else:
                    side_stream.wait_stream(torch.cuda.current_stream(run.gpu))
                    with torch.cuda.stream(side_stream):
                        encode()
                    torch.cuda.current_stream(run.gpu).wait_stream(side_stream)
            optimizer.step()
            if not run.dry:
                torch.cuda.synchronize(run.gpu)
            times.append(time.perf_counter() - began)
        return statistics.median(times[len(times) // 5 :])

    return timed


def _states(
    run: Run, timed: Callable[[Callable[[], None] | None], float], numel: int, shapes: tuple[tuple[int, ...], ...], flat: torch.Tensor
) -> dict[str, Any]:
    """Steps beside which schemes with a state encode."""
    found: dict[str, Any] = {}
    for name in STATE_CODECS:
        encode = _rounds(run, name, numel, shapes, flat) if run.left_s >= 5 else None
        if run.left_s < 5:
            found[name] = {"left_out": "the time was over"}
            continue
        if encode is None:
            found[name] = {"left_out": "no GPU side"}
            continue
        without, with_codec, again = timed(None), timed(encode), timed(None)
        found[name] = {"without_s": [without, again], "with_s": with_codec, "added": round(with_codec / ((without + again) / 2) - 1, 5)}
    return found


def _rounds(run: Run, name: str, numel: int, shapes: tuple[tuple[int, ...], ...], flat: torch.Tensor) -> Callable[[], None] | None:
    """What encodes all rounds of a scheme with a state, each answered by this rank's own payload; None where it has no GPU side."""
    from psgc.codecs import BucketContext, Stream, parse_scheme

    scheme = parse_scheme(name, BucketContext(shapes=shapes))
    if run.dry:
        from tests.device.cpu_state import CpuState

        state: Any = CpuState(scheme, numel)
    else:
        from psgc.codecs.backends import device_state

        state = device_state(scheme, numel, run.gpu)
    if state is None:
        return None
    residual, status = torch.zeros_like(flat), torch.zeros(2, dtype=torch.int64, device=run.gpu)
    outs = [torch.zeros(r.pair.push.payload_bound(r.numel), dtype=torch.uint8, device=run.gpu) for r in state.rounds]
    scratch = torch.empty(max(16, state.scratch_bytes()), dtype=torch.uint8, device=run.gpu)

    def encode() -> None:
        for index, out in enumerate(outs):
            state.encode(index, flat, residual, 1.0, Stream(0, 1, 0, 0), out, status, scratch)
            if index < len(outs) - 1:
                state.take(index, out)

    return encode


def two_ranks(run: Run) -> dict[str, Any]:
    """Jobs of two ranks and a server that share the GPU, and the same on the CPU, several at a time: every sum is the CPU path's, bit for bit. Then some of
    them alone, whose steps are timed."""
    found: dict[str, Any] = {}
    codecs = JOB_CODECS[1:2] if run.dry else JOB_CODECS
    with tempfile.TemporaryDirectory() as folder:
        places = ("cpu", "recorded" if run.dry else "cuda")
        jobs = begun([partial(_told, run, codec, where, Path(folder), EACH) for codec in codecs for where in places], JOBS_AT_ONCE)
        for number, codec in enumerate(codecs):
            both = [wait() for wait in jobs[2 * number : 2 * number + 2]]
            if wrong := [said for said in both if isinstance(said, str)]:
                print(*wrong, sep="\n", flush=True)
                found[codec] = {"failed": wrong}
            else:
                found[codec] = _compared(codec, *both)
            run.keep(found)
        found["alone"] = alone = list[dict[str, Any]]()
        for codec, buckets, env in TIMED_JOBS[1:2] if run.dry else TIMED_JOBS:
            told = [_told(run, codec, where, Path(folder), env) for where in places]
            times = {
                f"step_ms_{name}": said if isinstance(said, str) else said[0]["step_ms"]
                for name, said in zip(("cpu", "gpu"), told, strict=True)
            }
            alone.append({"codec": codec, "buckets": buckets, **times})
            if wrong := [said for said in told if isinstance(said, str)]:
                found[f"{codec} alone"] = {"failed": wrong}
            run.keep(found)
    if failed := [name for name, each in found.items() if "failed" in each]:
        found["failed"] = f"{', '.join(failed)}: see there"
    return found


def _told(run: Run, codec: str, where: str, folder: Path, env: dict[str, str]) -> list[dict[str, Any]] | str:
    """What each rank of a job says at its end; in words if it failed."""
    if run.left_s < 5:
        return f"{codec} on {where}: not begun, the time was over"
    out = folder / f"{codec.replace('/', '-')}.{where}"
    words = ("--workers", "2", "--servers", "1", "--", sys.executable, str(Path(__file__)), "--job", codec, where, str(out))
    done = run.command(sys.executable, "-m", "psgc.launch", "run", *words, env=env)
    if done.code != 0:
        return f"{codec} on {where}: status {done.code}: {done.said[-3000:]}"
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def _compared(codec: str, cpu: Any, gpu: Any) -> dict[str, Any]:
    alike = codec.partition(":")[0] in OWN_PRODUCTS
    pairs = (cpu, gpu) if alike else ((*cpu, *gpu),)
    same = all(one["digest"] == ranks[0]["digest"] for ranks in pairs for one in ranks)
    found = {"same_sums_as": "the other rank" if alike else "the CPU", "same_sums": same, "parts_a_launch": gpu[0]["parts_a_launch"]}
    if not same:
        found["failed"] = f"sums on the GPU are not those of {found['same_sums_as']}"
    return found


def job(codec: str, where: str, out: str) -> int:
    """One rank of ``two_ranks``: gradients of known values, encoded and summed; the digest of all results."""
    import hashlib

    import psgc.torch as psgc
    from psgc.torch.device.engines import engine_of

    if where == "recorded":
        from tests.device.recording import RecordingRuntime
        from tests.device.steps import use_recorded

        use_recorded(RecordingRuntime(), slot_bytes=1 << 16)
    psgc.init()
    device = torch.device("cuda" if where == "cuda" else "cpu")
    shapes = [(300, 1000), (4097,), (1,), (1000, 300), *[(500,)] * 40]
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    optimizer = psgc.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), [(f"p{i}", p) for i, p in enumerate(parameters)], compression=codec
    )
    digest, times = hashlib.sha256(), []
    wait = torch.cuda.synchronize if where == "cuda" else _nothing
    for step in range(STEPS_OF_JOB):
        made = torch.Generator().manual_seed(1000 * step + psgc.rank())
        optimizer.zero_grad()
        loss = sum((p * torch.randn(p.shape, generator=made).to(device)).sum() for p in parameters)
        wait()
        began = time.perf_counter()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
        for p in parameters:
            digest.update(p.detach().cpu().numpy().tobytes())
    engine = engine_of(parameters[0].data)
    launches = None if engine is None else engine.launches
    shared = round(launches.parts / launches.rounds, 2) if launches is not None and launches.rounds else None
    Path(f"{out}.{psgc.rank()}").write_text(
        json.dumps({"digest": digest.hexdigest(), "step_ms": round(statistics.median(times), 3), "parts_a_launch": shared})
    )
    psgc.barrier()
    psgc.shutdown()
    return 0


def _nothing() -> None:
    return


def nccl(run: Run) -> dict[str, Any]:
    """NCCL with one rank, by the code that groups run: two on one GPU it refuses, and several GPUs are not measured here."""
    if run.dry:
        return {"left_out": "dry run"}
    from torch import distributed as dist

    from psgc.torch.device.collectives import DeviceCollectives
    from psgc.torch.device.engines import engine_of

    values = torch.arange(1000.0, device=run.gpu)
    engine = engine_of(values)
    assert engine is not None
    group = engine.runtime.process_group(dist.HashStore(), 0, 1, 60.0)
    try:
        collectives = DeviceCollectives(engine, group, 0, 1)
        collectives.stream.wait(engine.runtime.current().record())
        collectives.all_reduce(values)
        collectives.broadcast(values, 0)
        collectives.reduce(values, 0)
        collectives.stream.record().synchronize()
        right = bool(torch.equal(values.cpu(), torch.arange(1000.0)))
    finally:
        group.shutdown()
    return (
        {"world_1": "the sum is right", "several_gpus": "unmeasured"} if right else {"failed": "all_reduce of one rank changed its values"}
    )


STEPS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "machine": machine, "warm": warm, "tests": tests, "kernels": kernels, "two_ranks": two_ranks, "many_tensors": many_tensors, "gpt": gpt, "nccl": nccl,
    "sanitizer": sanitizer,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
