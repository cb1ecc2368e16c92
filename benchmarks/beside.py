"""Does the network thread slow a trainer down? A host-bound eager torch loop, timed in turns beside 64 KB exchanges made by the network
thread of its own process, and beside the same exchanges made by another process.  python benchmarks/beside.py [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import torch

from psgc.config import Config
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession

NUMEL = 16384  # 64 KB of fp32
SLICE_S = 1.0


class Exchange:
    """64 KB push_pulls, one after the other at a fixed pace, by whoever runs it."""

    def __init__(self, session: ClusterSession, pace_hz: float) -> None:
        self._session, self._pause = session, 1 / pace_hz
        self._array = np.ones(NUMEL, np.float32)
        self._declaration = Declaration("beside", "adhoc", (TensorSpec("x", (NUMEL,), "float32"),), "none", False)
        self.count = 0
        self.idle = threading.Lock()
        self.on = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def load(self) -> np.ndarray:
        return self._array

    waits = False

    def store(self, skipped: bool) -> None:
        """The sum is where it is wanted."""

    def _run(self) -> None:
        while True:
            self.on.wait()
            start = time.perf_counter()
            with self.idle:
                self._session.wait([self._session.submit_named(self._declaration, self)])
                self.count += 1
            time.sleep(max(0.0, self._pause - (time.perf_counter() - start)))


def eager_loop(seconds: float) -> float:
    """Iterations a second of a loop of small torch calls: the interpreter is its bottleneck."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            x = torch.tanh(x @ w + 0.1)
        count += 1
    return count / (time.perf_counter() - start)


def worker(spec: dict[str, float]) -> None:
    """Run under ``psgc run``, with one worker: trainer and network thread in one process."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    session = ClusterSession.open(Config.from_env())
    exchange = Exchange(session, spec["pace_hz"])
    rates: dict[str, list[float]] = {"nothing": [], "thread": []}
    for _ in range(int(spec["rounds"])):
        for mode in ("nothing", "thread"):
            (exchange.on.set if mode == "thread" else exchange.on.clear)()
            time.sleep(0.05)
            rates[mode].append(eager_loop(SLICE_S))
    exchange.on.clear()
    with exchange.idle:
        session.close()
    print(json.dumps({"rates": rates, "exchanges": exchange.count}), flush=True)


def run_job(code: str, spec: dict[str, float]) -> dict[str, object]:
    """One job of one worker that runs ``code``; the JSON it prints."""
    command = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--no-prefix",
        "--workers",
        "1",
        "--",
        sys.executable,
        "-c",
        code,
        json.dumps(spec),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    )
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


THREAD = "import json, sys, beside; beside.worker(json.loads(sys.argv[1]))"
OTHER = "import json, sys, beside; beside.other_process(json.loads(sys.argv[1]))"
PARTNER = "import beside; beside.partner()"


def other_process(spec: dict[str, float]) -> None:
    """The worker does the exchanges and nothing else; the eager loop runs in a child that has no psgc in it."""
    session = ClusterSession.open(Config.from_env())
    exchange = Exchange(session, spec["pace_hz"])
    child = subprocess.Popen([sys.executable, "-c", PARTNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    rates: dict[str, list[float]] = {"nothing": [], "process": []}
    for _ in range(int(spec["rounds"])):
        for mode in ("nothing", "process"):
            (exchange.on.set if mode == "process" else exchange.on.clear)()
            time.sleep(0.05)
            child.stdin.write("go\n")
            child.stdin.flush()
            rates[mode].append(float(child.stdout.readline()))
    exchange.on.clear()
    with exchange.idle:
        session.close()
    child.stdin.close()
    child.wait()
    print(json.dumps({"rates": rates, "exchanges": exchange.count}), flush=True)


def partner() -> None:
    torch.set_num_threads(1)
    for _ in sys.stdin:
        print(eager_loop(SLICE_S), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pace-hz", type=float, default=100.0, help="exchanges a second; 100 is 13 MB/s both ways")
    options = parser.parse_args()
    spec = {"rounds": options.rounds, "pace_hz": options.pace_hz}
    for name, code in (("thread", THREAD), ("process", OTHER)):
        result = run_job(code, spec)
        rates: dict[str, list[float]] = result["rates"]  # type: ignore[assignment]
        ratios = [with_ / without for without, with_ in zip(rates["nothing"], rates[name], strict=True)]
        print(
            f"exchanges in a {name}: the loop runs at {statistics.median(ratios):.1%} of its own pace "
            f"(pairs {min(ratios):.1%} .. {max(ratios):.1%}; {statistics.median(rates['nothing']):.0f} iterations/s alone; "
            f"{result['exchanges']} exchanges)"
        )


if __name__ == "__main__":
    main()
