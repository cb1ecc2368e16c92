"""Everything that only a GPU can show, in one command of less than 8 minutes and without network: `python benchmarks/gpu.py`, from a checkout.

Runs the tests of the kernels and of the device path on the GPU, compute-sanitizer where it is there, `psgc bench kernels --device cuda`, a GPT step with and
without the encode of each codec, and of schemes with a state, beside it, and jobs of two ranks that share the GPU through a server, whose sums have to be
those of the CPU path bit for bit (with PowerSGD, whose products are each device's own: those of the other rank). NCCL is tried with one rank. Writes
docs/results/DEVICE.json, which `psgc codecs` and `psgc advise` cite. A step that fails or is left out says why in the document; the command then
ends with status 1. `--dry-run` takes every step with the CPU in the GPU's place, at small sizes, and writes nowhere but to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BUDGET_S = 470.0
JOB_CODECS = ("none", "int8", "onebit", "onebit:momentum=nesterov", "powersgd:rank=4")
OWN_PRODUCTS = ("powersgd",)  # each device has products of its own: ranks agree, but not with the CPU
STATE_CODECS = ("onebit:momentum=nesterov", "powersgd:rank=4")
STEP_CODECS = ("none", "bf16", "int8", "int4", "fp8", "onebit", "topk", "blocktopk", "randomk")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the document; default: docs/results/DEVICE.json")
    parser.add_argument("--dry-run", action="store_true", help="with the CPU in the GPU's place")
    parser.add_argument("--steps", default="", help="some of the steps, with commas between them; default: all")
    parser.add_argument("--job", nargs=3, metavar=("CODEC", "WHERE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return job(*options.job)
    if not options.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device on this machine; --dry-run tries the steps on the CPU", file=sys.stderr)
        return 2
    run = Run(options.dry_run)
    wanted = [name for name in options.steps.split(",") if name] or list(STEPS)
    document: dict[str, Any] = {
        "version": 1,
        "device": run.device_name,
        "date": time.strftime("%Y-%m-%d"),
        "dry_run": options.dry_run,
        "steps": {},
    }
    for name in wanted:
        began = time.monotonic()
        print(f"{name} ...", flush=True)
        if run.left_s < 5:
            found: dict[str, Any] = {"left_out": "the 8 minutes were over"}
        else:
            try:
                found = STEPS[name](run)
            except Exception as error:  # the other steps still say what they have to
                found = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:2000]}
        found["took_s"] = round(time.monotonic() - began, 1)
        document["steps"][name] = found
        print(f"{name}: {found.get('failed') or found.get('left_out') or 'done'} ({found['took_s']} s)", flush=True)
    out = options.out or ROOT / "docs" / "results" / f"{re.sub(r'[^a-z0-9]+', '-', run.device_name.lower()).strip('-')}.json"
    if options.out is not None or not options.dry_run:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {out}")
    return int(any("failed" in found for found in document["steps"].values()))


class Run:
    """Where the steps run. gpu: where tensors are put."""

    def __init__(self, dry: bool) -> None:
        from psgc.launch.bench.gpu_kernels import CudaStopwatch, HostStopwatch

        self.dry, self._until = dry, time.monotonic() + BUDGET_S
        self.watch: Any = HostStopwatch(_stand_in) if dry else CudaStopwatch()
        self.gpu, self.device_name = self.watch.device, "dry run" if dry else self.watch.name

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def command(self, *words: str, share: float = 0.5, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command for at most this share of the time that is left. Raises subprocess.TimeoutExpired."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        full = {**os.environ, "PYTHONPATH": path, **(env or {})}
        return subprocess.run(words, cwd=ROOT, env=full, text=True, capture_output=True, timeout=max(5.0, share * self.left_s), check=False)


def _stand_in(codec: Any) -> Any:
    """What runs in a GPU side's place in a dry run."""
    from tests.device.recording import CpuCodec

    class Side(CpuCodec):
        def moved_bytes(self, operation: str, numel: int, item_bytes: int = 4, payloads: int = 1) -> int:
            return numel * (item_bytes + payloads)

    return Side(codec)


def machine(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
    }
    if not run.dry:
        properties = torch.cuda.get_device_properties(run.gpu)
        found |= {"memory_bytes": properties.total_memory, "capability": list(torch.cuda.get_device_capability(run.gpu)),
                  "gpus": torch.cuda.device_count()}  # fmt: skip
        import triton

        found["triton"] = triton.__version__
        if shutil.which("nvidia-smi"):
            query = run.command(
                "nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv,noheader"
            )
            found["nvidia_smi"] = query.stdout.strip().splitlines()[:1]
    return found


def tests(run: Run) -> dict[str, Any]:
    """The kernels against the CPU's bytes, and the device path, on this device."""
    if run.dry:
        done = run.command(
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/cuda", "tests/device", share=0.9
        )
        return _passed(done, "collected")
    return _passed(
        run.command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda", "tests/device", share=0.35), "ran"
    )


def _passed(done: subprocess.CompletedProcess[str], what: str) -> dict[str, Any]:
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    return {what: last} if done.returncode == 0 else {"failed": last, "tail": done.stdout[-3000:]}


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
    done = run.command(tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code, share=0.3)
    said = done.stdout + done.stderr
    if done.returncode == 0 and "ERROR SUMMARY: 0 errors" in said:
        return {"ran": "memcheck: 0 errors"}
    if "ERROR SUMMARY" not in said or re.search(r"not supported|not permitted|insufficient permission|Unable to", said):
        return {"left_out": f"compute-sanitizer does not run here: {' '.join(said.split())[-300:]}", "skipped": 1}
    return {"failed": " ".join(said.split())[-2000:]}


def kernels(run: Run) -> dict[str, Any]:
    from psgc.codecs import registered_codecs
    from psgc.launch.bench.gpu_kernels import bench_gpu_kernels

    sizes = [4096] if run.dry else [1 << 16, 1 << 20, 100_000_000]
    codecs = ["int8", "topk"] if run.dry else list(registered_codecs())
    return bench_gpu_kernels(
        sizes, codecs, run.watch, lambda text: print("  ", text, flush=True), ("torch",) if run.dry else ("torch", "torch.compile")
    )


def many_tensors(run: Run) -> dict[str, Any]:
    """300 small tensors in one launch, beside one tensor of as many elements."""
    from psgc.codecs import Stream, parse_codec

    each, many = (64, 4) if run.dry else (10_000, 300)
    found: dict[str, Any] = {}
    for name in ("int8", "onebit"):
        codec = parse_codec(name)
        side = run.watch.side(codec)
        if side is None or not hasattr(side, "encode_many"):
            found[name] = {"left_out": "no GPU side that encodes many"}
            continue
        from psgc.cuda.common.device_codec import Encoding

        def item(numel: int, codec: Any = codec, side: Any = side) -> Any:
            scratch = side.scratch_bytes(numel)
            return Encoding(
                torch.randn(numel, device=run.gpu), torch.randn(numel, device=run.gpu) if codec.feedback else None, 1.0, Stream(0, 1, 0, 0),
                torch.zeros(max(16, codec.payload_bound(numel)), dtype=torch.uint8, device=run.gpu),
                torch.zeros(2, dtype=torch.int64, device=run.gpu), torch.empty(scratch, dtype=torch.uint8, device=run.gpu) if scratch else None,
            )  # fmt: skip

        small, one = [item(each) for _ in range(many)], item(each * many)
        together = run.watch.seconds(lambda _, side=side, small=small: side.encode_many(small), 1)
        alone = run.watch.seconds(
            lambda _, side=side, one=one: side.encode(one.grad, one.residual, 1.0, one.stream, one.out, one.status, one.scratch), 1
        )
        found[name] = {"many_s": together, "one_s": alone, "ratio": round(together / alone, 3)}
    return found


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
    found: dict[str, Any] = {"parameters": numel, "codecs": {}}
    side_stream = None if run.dry else torch.cuda.Stream(run.gpu)

    def timed(encode: Callable[[], None] | None) -> float:
        times = []
        for _ in range(3 if run.dry else 25):
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

    timed(None)
    for name in ("none", "int8") if run.dry else STEP_CODECS:
        codec = parse_codec(name)
        side = run.watch.side(codec)
        if side is None:
            found["codecs"][name] = {"left_out": "no GPU side"}
            continue
        out = torch.zeros(codec.payload_bound(numel), dtype=torch.uint8, device=run.gpu)
        status, residual = torch.zeros(2, dtype=torch.int64, device=run.gpu), torch.zeros_like(flat) if codec.feedback else None
        scratch = torch.empty(side.scratch_bytes(numel), dtype=torch.uint8, device=run.gpu)
        torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])

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
        del out, residual, scratch
    found["codecs"] |= _states(run, timed, numel, tuple(tuple(p.shape) for p in model.parameters()), flat)
    return found


def _states(
    run: Run, timed: Callable[[Callable[[], None] | None], float], numel: int, shapes: tuple[tuple[int, ...], ...], flat: torch.Tensor
) -> dict[str, Any]:
    """Steps beside which schemes with a state encode."""
    found: dict[str, Any] = {}
    for name in STATE_CODECS:
        encode = _rounds(run, name, numel, shapes, flat)
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
    """Jobs of two ranks and a server that share the GPU: every sum is the CPU path's, bit for bit."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for codec in JOB_CODECS[1:2] if run.dry else JOB_CODECS:
            digests = {}
            for where in ("cpu", "recorded" if run.dry else "cuda"):
                out = Path(folder) / f"{codec}.{where}"
                few = {"PSGC_FUSE_BYTES": "0", "PSGC_MIN_COMPRESS_BYTES": "0"}  # a bucket for each tensor
                words = ("--workers", "2", "--servers", "1", "--", sys.executable, str(Path(__file__)), "--job", codec, where, str(out))
                done = run.command(sys.executable, "-m", "psgc.launch", "run", *words, share=0.4, env=few)
                if done.returncode:
                    return {"failed": f"{codec} on {where}: {' '.join((done.stdout + done.stderr).split())[-1500:]}"}
                digests[where] = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
            cpu, gpu = digests.values()
            alike = codec.partition(":")[0] in OWN_PRODUCTS
            pairs = (cpu, gpu) if alike else ((*cpu, *gpu),)
            same = all(one["digest"] == ranks[0]["digest"] for ranks in pairs for one in ranks)
            found[codec] = {"same_sums_as": "the other rank" if alike else "the CPU", "same_sums": same, "step_ms_cpu": cpu[0]["step_ms"],
                            "step_ms_gpu": gpu[0]["step_ms"], "parts_a_launch": gpu[0]["parts_a_launch"]}  # fmt: skip
            if not same:
                found["failed"] = f"{codec}: sums on the GPU are not those of {found[codec]['same_sums_as']}"
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
    for step in range(6):
        made = torch.Generator().manual_seed(1000 * step + psgc.rank())
        optimizer.zero_grad()
        loss = sum((p * torch.randn(p.shape, generator=made).to(device)).sum() for p in parameters)
        began = time.perf_counter()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        for p in parameters:
            digest.update(p.detach().cpu().numpy().tobytes())
        times.append(1e3 * (time.perf_counter() - began))
    engine = engine_of(parameters[0].data)
    launches = None if engine is None else engine.launches
    shared = round(launches.parts / launches.launched, 2) if launches is not None and launches.launched else None
    Path(f"{out}.{psgc.rank()}").write_text(
        json.dumps({"digest": digest.hexdigest(), "step_ms": round(statistics.median(times), 3), "parts_a_launch": shared})
    )
    psgc.barrier()
    psgc.shutdown()
    return 0


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
    "machine": machine, "kernels": kernels, "many_tensors": many_tensors, "two_ranks": two_ranks, "gpt": gpt, "nccl": nccl, "tests": tests,
    "sanitizer": sanitizer,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
