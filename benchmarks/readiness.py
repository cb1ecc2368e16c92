"""What it costs to be ready for a server's death: steps under PSGC_ON_SERVER_LOSS=restart against stop, in turns. And for the loss of its machine:
PSGC_REPLICAS=1 against 0.

    python benchmarks/readiness.py --minutes 4
    python benchmarks/readiness.py --minutes 4 --replicas

Each pair is two jobs of ``psgc bench pushpull`` (sums are checked), whose order alternates; with --replicas two jobs of two servers and two workers under four
launchers on this machine, each server's standby beside the other server, over TCP. Prints medians, and of the pairs' ratios median and quartiles.
On a busy machine the quartiles say that it means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

CASES = {
    "25 MB, none": ["--bytes", "25000000", "--transport", "shm", "--rounds", "60"],
    "1 MB, onebit": ["--bytes", "1000000", "--transport", "shm", "--codec", "onebit", "--rounds", "300"],
    "4 KB, none": ["--bytes", "4096", "--transport", "shm", "--rounds", "1000"],
}
LAUNCHER = "from psgc.launch.job.bpslaunch import main; main()"


def one_machine(case: list[str], mode: str) -> float:
    """The median of a step, ms."""
    command = [sys.executable, "-m", "psgc", "bench", "pushpull", "--workers", "2", "--servers", "1", "--json", *case]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PSGC_ON_SERVER_LOSS": mode})
    return float(json.loads(ran.stdout)["median_ms"])


def several_launchers(case: list[str], replicas: str) -> float:
    """The same, of a job under a launcher for the scheduler, one for each of two servers, and one for two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
        "BYTEPS_FORCE_DISTRIBUTED": "1", "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_SIZE": "2", "PSGC_TRANSPORT": "tcp", "PSGC_REPLICAS": replicas,
        "PSGC_LOG_LEVEL": "error",
    }  # fmt: skip
    options = case[: case.index("--transport")] + case[case.index("--transport") + 2 :]
    job = [sys.executable, __file__, "--worker", *options]
    started = []
    try:
        for role, command in (("scheduler", []), ("server", []), ("server", []), ("worker", job)):
            launcher = [sys.executable, "-c", LAUNCHER, *command]
            started.append(subprocess.Popen(launcher, env={**common, "DMLC_ROLE": role}, stdout=subprocess.PIPE, text=True))
        out = started[-1].communicate(timeout=600)[0]
        if any(popen.wait(60) for popen in started):
            raise SystemExit(f"a job of PSGC_REPLICAS={replicas} has failed: {[popen.returncode for popen in started]}")
    finally:
        for popen in started:
            popen.kill()
    return float(out.rpartition("median_ms ")[2])


def work(nbytes: int, rounds: int, codec: str) -> None:
    """One worker of it: rounds of one tensor, whose sums are checked."""
    import torch

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    value, times = torch.ones(nbytes // 4), []
    for step in range(rounds + 5):
        tensor = value.clone()
        began = time.perf_counter()
        result = psgc.push_pull(tensor, name="x", average=False, compression=codec)
        times.append(time.perf_counter() - began)
        if not torch.equal(result, torch.full_like(result, 2.0)):
            raise SystemExit(f"round {step}: the sum is wrong: {result[:3]}")
    if psgc.rank() == 0:
        print(f"median_ms {1e3 * statistics.median(times[5:])}", flush=True)
    psgc.shutdown()


def compare(modes: tuple[str, str], name: str, minutes: float, median_ms: Callable[[list[str], str], float]) -> None:
    for case, options in CASES.items():
        until, found = time.monotonic() + 60 * minutes / len(CASES), {mode: [] for mode in modes}
        while time.monotonic() < until or len(found[modes[1]]) < 2:
            for mode in modes if len(found[modes[1]]) % 2 else modes[::-1]:
                found[mode].append(median_ms(options, mode))
        ratios = [ready / not_ready for ready, not_ready in zip(*found.values(), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ready, not_ready = (statistics.median(times) for times in found.values())
        print(
            f"{case}: {name}={modes[0]} {ready:.3f} ms, {modes[1]} {not_ready:.3f} ms, {len(ratios)} pairs, "
            f"ratio {middle:.3f} ({low:.3f} to {high:.3f})", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="in all")
    parser.add_argument("--replicas", action="store_true", help="PSGC_REPLICAS=1 against 0")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--codec", default="none", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.bytes, given.rounds, given.codec)
    elif given.replicas:
        compare(("1", "0"), "PSGC_REPLICAS", given.minutes, several_launchers)
    else:
        compare(("restart", "stop"), "PSGC_ON_SERVER_LOSS", given.minutes, one_machine)


if __name__ == "__main__":
    main()
