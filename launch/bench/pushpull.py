"""How long one push_pull takes on this machine: real scheduler, servers and workers, the answer checked first, gloo beside it.

``bench_pushpull`` starts the job; ``worker_main`` is what each worker runs. Rank 0 writes what it measured to a file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from psgc.errors import JobFailed, PsgcError, UsageError

WARM_UP = 3


def bench_pushpull(
    workers: int, servers: int, nbytes: int, codec: str = "none", transport: str = "auto", rounds: int = 20, gloo: bool = True
) -> dict[str, Any]:
    """Run the bench. Raises JobFailed if the job does, PsgcError if a sum is wrong (nothing is timed then).

    best_ms, median_ms, p99_ms: of rank 0, over ``rounds`` rounds after a warm-up. wire_bytes: a worker's, a step, both ways, headers
    included. gloo_median_ms: torch.distributed's all-reduce of the same bytes between as many processes, in the same run.
    """
    if nbytes < 4 or nbytes % 4:
        raise UsageError(f"--bytes {nbytes}: expected a positive multiple of 4 (fp32 elements)")
    with tempfile.TemporaryDirectory(prefix="psgc-bench-") as folder:
        out = Path(folder) / "result.json"
        spec = {"numel": nbytes // 4, "codec": codec, "rounds": rounds, "out": str(out), "gloo": gloo and workers > 1, "folder": folder}
        env = {**os.environ, "PSGC_TRANSPORT": transport}
        command = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--servers", str(servers), "--",
                   sys.executable, "-c", "from psgc.launch.bench.pushpull import worker_main; worker_main()", json.dumps(spec)]  # fmt: skip
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines()
            raise JobFailed(f"bench pushpull: the job failed: {lines[-1] if lines else f'status {done.returncode}'}")
        result: dict[str, Any] = json.loads(out.read_text())
    return {"workers": workers, "servers": servers, "bytes": nbytes, "codec": codec, "transport": transport, **result}


def worker_main() -> None:
    """One worker: check the sums of the first rounds, then time the rest."""
    spec = json.loads(sys.argv[-1])
    import torch

    torch.set_num_threads(1)
    import psgc.torch as psgc

    psgc.init()
    try:
        result = _measure(psgc, torch, spec)
        if psgc.rank() == 0:
            Path(spec["out"]).write_text(json.dumps(result))
    finally:
        psgc.shutdown()


def _measure(psgc: Any, torch: Any, spec: dict[str, Any]) -> dict[str, Any]:
    numel, codec = spec["numel"], spec["codec"]
    rank, size = psgc.rank(), psgc.size()
    base = torch.from_numpy(np.random.default_rng(7).standard_normal(numel).astype(np.float32))
    tensor = torch.empty(numel)
    _check(psgc, torch, tensor, base, rank, size, codec)
    times = []
    session = psgc.current_session()
    before = session.statistics()["wire_bytes"]
    for round_number in range(WARM_UP + spec["rounds"]):
        tensor.copy_(base)
        tensor.mul_(rank + 1 + round_number % 3)
        psgc.barrier()
        start = time.perf_counter()
        psgc.push_pull_inplace(tensor, average=False, name="bench", compression=codec)
        times.append((time.perf_counter() - start) * 1e3)
    wire = (session.statistics()["wire_bytes"] - before) // (WARM_UP + spec["rounds"])
    times = times[WARM_UP:]
    return {
        "best_ms": min(times), "median_ms": statistics.median(times), "p99_ms": float(np.percentile(times, 99)),
        "wire_bytes": wire, "gloo_median_ms": _gloo(psgc, torch, tensor, spec, rank, size) if spec["gloo"] else None, "checked": True,
    }  # fmt: skip


def _check(psgc: Any, torch: Any, tensor: Any, base: Any, rank: int, size: int, codec: str) -> None:
    """The sum of (rank + 1) * base; exact without compression, close with it where one step can be."""
    tensor.copy_(base)
    tensor.mul_(rank + 1)
    psgc.push_pull_inplace(tensor, average=False, name="bench", compression=codec)
    want = base * float(size * (size + 1) // 2)
    if codec == "none":
        terms = [base * float(r + 1) for r in range(size)]
        want = terms[0]
        for term in terms[1:]:
            want = want + term
        wrong = not torch.equal(tensor, want)
    else:
        # One step of a lossy codec only has to point the right way; conservation is the codecs' own tests' business.
        wrong = not float(torch.dot(tensor, want)) > 0
    if wrong or not bool(torch.isfinite(tensor).all()):
        raise PsgcError(f"bench pushpull: rank {rank} got a wrong sum under codec {codec}; nothing is timed")


def _gloo(psgc: Any, torch: Any, tensor: Any, spec: dict[str, Any], rank: int, size: int) -> float:
    """Median of torch.distributed's all-reduce of the same tensor, in these same processes."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{spec['folder']}/gloo", rank=rank, world_size=size)
    times = []
    for _ in range(WARM_UP + spec["rounds"]):
        psgc.barrier()
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        times.append((time.perf_counter() - start) * 1e3)
    distributed.destroy_process_group()
    return float(statistics.median(times[WARM_UP:]))
