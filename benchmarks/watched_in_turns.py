"""What metrics cost a job: two jobs, one with PSGC_METRICS_PORT and scraped once a second, one without, take turns of about a second on one machine.

    python benchmarks/watched_in_turns.py [--rounds 4] [--pairs 20] [--every 1] [--codec int8] [--port 9400] [--json]

Each round starts both jobs (2 workers and 1 server; a network of 1.9 M parameters) and has them train in turns; the one that does not train sleeps. The
order within a pair changes from pair to pair, and which job starts first from round to round. All of the scraped job's endpoints (the scheduler's, the
workers' and the server's) are read once in each of its turns, or in every so many (``--every 15``: each 15 s of its training, as Prometheus is mostly told
to); what the reader takes is on its account. Two jobs differ by themselves, as memory happens to lie: hence the rounds.

Prints the median over all pairs of (step with) / (step without), with a 95 % interval of the median by order statistics, and each round's own median; and
the same of the processor time that all processes of a job take for a step, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tracing import interval

from psgc.diagnostics.machine import machine
from psgc.observe.exporter import OF_SERVERS, OF_WORKERS

WORKERS: Final = 2
WARM_STEPS: Final = 30
TURN_S: Final = 1.0
START_S: Final = 240.0


def train(port: int) -> None:
    """A worker: as many steps as it is told, again and again; answers with the seconds that each took."""
    import torch
    from torch import nn

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.randn(64, 784)
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as words:
        print(psgc.rank(), file=words, flush=True)
        while steps := int(words.readline() or 0):
            took = []
            for _ in range(steps):
                began = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                took.append(time.perf_counter() - began)
            print(json.dumps(took), file=words, flush=True)


class Taking:
    """One of the two jobs. endpoints: ports to read once in each turn."""

    def __init__(self, env: dict[str, str], codec: str, endpoints: Sequence[int]) -> None:
        self.endpoints = endpoints
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(START_S)
            own = [sys.executable, __file__, "--train", str(listener.getsockname()[1])]
            command = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(WORKERS), "--codec", codec, "--", *own]
            self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            found: dict[int, IO[str]] = {}
            try:
                while len(found) < WORKERS:
                    connection, _ = listener.accept()
                    with connection:
                        words = connection.makefile("rw")
                    found[int(words.readline())] = words
            except TimeoutError:
                self.process.terminate()
                sys.exit(f"the job has not begun within {START_S:.0f} s: {self.process.communicate()[1]}")
        self.ranks = [found[rank] for rank in range(WORKERS)]

    def cpu_s(self) -> float:
        """Processor time of all of the job's threads so far."""
        found, pids = 0, [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += int((task / "schedstat").read_text().split()[0])
                pids.extend(map(int, (task / "children").read_text().split()))
        return found / 1e9

    def turn(self, steps: int, expected_s: float, *, read: bool) -> tuple[float, float]:
        """Rank 0's mean step and the job's processor time for a step, in seconds, over so many steps. read: the endpoints, in the midst of them."""
        before = self.cpu_s()
        for words in self.ranks:
            print(steps, file=words, flush=True)
        reader = threading.Timer(expected_s / 3, self.read if read else lambda: None)
        reader.start()
        took = [json.loads(words.readline()) for words in self.ranks]
        reader.join()
        return statistics.mean(took[0]), (self.cpu_s() - before) / steps

    def read(self) -> None:
        """Scrape, as Prometheus does."""
        for port in self.endpoints:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                answer.read()

    def end(self) -> None:
        """Both ranks' last turn is over."""
        for words in self.ranks:
            print(0, file=words, flush=True)
            words.close()
        if self.process.wait(START_S):
            sys.exit(f"a job failed: {self.process.communicate()[1]}")


Turn = tuple[float, float]  # a step, and its processor time


def one_round(port: int, codec: str, pairs: int, every: int, *, watched_first: bool) -> list[tuple[Turn, Turn]]:
    """With and without, of each pair of turns."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
    endpoints = [port, *(port + OF_WORKERS + rank for rank in range(WORKERS)), port + OF_SERVERS]
    with ExitStack() as ends:
        of = {}
        for watched in (watched_first, not watched_first):
            of[watched] = Taking(clean | ({"PSGC_METRICS_PORT": str(port)} if watched else {}), codec, endpoints if watched else ())
            ends.callback(of[watched].end)
        jobs = [of[True], of[False]]
        step_s = max(job.turn(WARM_STEPS, TURN_S, read=True)[0] for job in jobs)
        steps = max(1, round(TURN_S / step_s))
        found = []
        for number in range(pairs):
            order = jobs if number % 2 else jobs[::-1]
            took = {id(job): job.turn(steps, steps * step_s, read=number % every == every // 2) for job in order}
            found.append((took[id(jobs[0])], took[id(jobs[1])]))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20, help="of turns, in each round")
    parser.add_argument("--every", type=int, default=1, help="turns of the scraped job, of a second each, from one scrape to the next")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--port", type=int, default=9400, help="PSGC_METRICS_PORT of the scraped job")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    rounds = []
    for number in range(1, options.rounds + 1):
        rounds.append(one_round(options.port, options.codec, options.pairs, max(1, options.every), watched_first=number % 2 == 1))
        median = statistics.median(watched[0] / plain[0] for watched, plain in rounds[-1])
        print(f"round {number} of {options.rounds}: a step with / without {median:.4f}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"pairs": sum(map(len, rounds)), "codec": options.codec, "every": options.every, "machine": machine()}
    for number, name in enumerate(("step", "cpu")):
        ratios = [[watched[number] / plain[number] for watched, plain in of_round] for of_round in rounds]
        low, high = interval([ratio for of_round in ratios for ratio in of_round])
        found[name] = {
            "ms": 1e3 * statistics.median(plain[number] for of_round in rounds for _, plain in of_round), "low": low, "high": high,
            "ratio": statistics.median(ratio for of_round in ratios for ratio in of_round), "rounds": list(map(statistics.median, ratios)),
        }  # fmt: skip
    if options.json:
        print(json.dumps(found))
        return
    print(f"{machine()}; {options.codec}, {found['pairs']} pairs of turns")
    for name, what in (("step", "a step"), ("cpu", "processor time a step")):
        each = found[name]
        print(
            f"{what}: {each['ms']:.2f} ms without metrics; with / without {each['ratio']:.4f}, 95 % {each['low']:.4f} to {each['high']:.4f}; "
            f"of each round {', '.join(f'{ratio:.4f}' for ratio in each['rounds'])}"
        )


if __name__ == "__main__":
    main()
