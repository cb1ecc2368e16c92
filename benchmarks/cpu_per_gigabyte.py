"""CPU seconds that a gigabyte of gradients costs a worker and a server, by carrier, beside bare sockets that move as many bytes and add nothing.

    python benchmarks/cpu_per_gigabyte.py                        25 MB tensors, uncompressed
    python benchmarks/cpu_per_gigabyte.py --codec int8 --mb 100

Two workers exchange one tensor, one exchange after the other. A row's figures are user and system time of the whole process, from the kernel, over the
exchanges that count. A worker's gigabyte: of its gradients. A server's: of gradients that workers push to it, so both workers' together. Without servers
there is only the worker's. Sums are checked. Other work on the machine changes CPU
time less than it changes seconds, but caches are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

WORKERS: Final = 2
WARM_UP: Final = 5
CARRIERS: Final = {  # name: servers, PSGC_TRANSPORT
    "servers, TCP": ("1", "tcp"),
    "servers, shared memory": ("1", "auto"),
    "groups, gloo over TCP": ("0", "tcp"),
    "groups, shared memory": ("0", "auto"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """CPU seconds a gigabyte; server_s: -1 without servers."""

    carrier: str
    worker_user_s: float
    worker_system_s: float
    server_user_s: float = -1.0
    server_system_s: float = -1.0


def cpu_s(process: int | str = "self") -> tuple[float, float]:
    """User and system time of a process so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(words[11]) / tick, int(words[12]) / tick


def server_of_this_job() -> int | None:
    """The process of the job's only server: as this worker, a child of the launcher."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, words = int(status.read_text().rpartition(")")[2].split()[1]), (status.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue  # it has ended
        if parent == os.getppid() and b"server" in words:
            return int(status.parent.name)
    return None


def work(codec: str, mb: float, rounds: int, out: Path) -> None:
    """One worker; rank 0 writes what it and the server have worked."""
    import torch

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    tensor = torch.full((int(mb * 250_000),), float(psgc.rank() + 1))
    server = server_of_this_job()
    for step in range(WARM_UP + rounds):
        if step == WARM_UP:
            psgc.barrier()
            before = cpu_s(), cpu_s(server) if server else (0.0, 0.0)
        tensor.fill_(psgc.rank() + 1)
        psgc.push_pull_inplace(tensor, name="x", average=False, compression=codec)
    psgc.barrier()
    after = cpu_s(), cpu_s(server) if server else (0.0, 0.0)
    right = torch.allclose(tensor, torch.full_like(tensor, WORKERS * (WORKERS + 1) / 2), rtol=0.02)
    if psgc.rank() == 0:
        gigabytes = rounds * mb / 1e3
        worker = [(b - a) / gigabytes for a, b in zip(before[0], after[0], strict=True)]
        served = [(b - a) / gigabytes / WORKERS for a, b in zip(before[1], after[1], strict=True)] if server else [-1.0, -1.0]
        out.write_text(json.dumps({"right": right, "figures": worker + served}))
    psgc.shutdown()


def bare_end(mb: float, rounds: int, connection: socket.socket, first: Callable[[], None]) -> None:
    """Send ``mb`` and receive as much, again and again. first: called after the warm-up."""
    data, into = bytearray(int(mb * 1e6)), memoryview(bytearray(int(mb * 1e6)))
    for step in range(WARM_UP + rounds):
        if step == WARM_UP:
            first()
        receiver = threading.Thread(target=receive, args=(connection, into))
        receiver.start()
        connection.sendall(data)
        receiver.join()


def receive(connection: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got:])
        if not count:
            raise ConnectionError("the other end has gone")
        got += count


def bare(mb: float, rounds: int) -> Row:
    """A worker's share of an exchange with a server (all bytes out, as many back) over blocking sockets and loopback, into memory that is used again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if not child:
            with socket.create_connection(listener.getsockname()) as own:
                bare_end(mb, rounds, own, lambda: None)
            os._exit(0)
        began: list[tuple[float, float]] = []
        with listener.accept()[0] as other:
            bare_end(mb, rounds, other, lambda: began.append(cpu_s()))
        ended = cpu_s()
        if os.waitpid(child, 0)[1]:
            sys.exit("cpu_per_gigabyte: the other end of the bare sockets has failed; see above")
    user, system = ((b - a) / (rounds * mb / 1e3) for a, b in zip(began[0], ended, strict=True))
    return Row("bare sockets, TCP", user, system, user, system)


def measure(carrier: str, codec: str, mb: float, rounds: int) -> Row:
    servers, transport = CARRIERS[carrier]
    with tempfile.TemporaryDirectory(prefix="psgc-cpu-") as folder:
        out = Path(folder) / "measured.json"
        worker = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--work",
            str(out),
            "--codec",
            codec,
            "--mb",
            str(mb),
            "--rounds",
            str(rounds),
        ]
        run = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(WORKERS), "--servers", servers, "--", *worker]
        env = {**os.environ, "PSGC_TRANSPORT": transport, "PSGC_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
        status = subprocess.run(run, env=env, check=False, stdout=sys.stderr).returncode
        if status:
            sys.exit(f"cpu_per_gigabyte: {carrier}: the job ended with status {status}; what it said is above")
        found: dict[str, Any] = json.loads(out.read_text())
    if not found["right"]:
        sys.exit(f"cpu_per_gigabyte: {carrier}: sums are wrong with {codec}")
    return Row(carrier, *found["figures"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--mb", type=float, default=25.0, help="of fp32 gradients in an exchange (default: 25)")
    parser.add_argument("--rounds", type=int, default=40, help="that count (default: 40)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.mb <= 0:
        parser.error(f"--rounds {options.rounds} --mb {options.mb:g}: expected at least 1, and more than 0")
    if options.work:
        work(options.codec, options.mb, options.rounds, options.work)
        return
    rows = [bare(options.mb, options.rounds)] + [measure(carrier, options.codec, options.mb, options.rounds) for carrier in CARRIERS]
    if options.json:
        print(json.dumps({"hardware": machine(), "codec": options.codec, "mb": options.mb, "rows": [asdict(row) for row in rows]}))
        return
    body = []
    for row in rows:
        served = ["", ""] if row.server_user_s < 0 else [f"{row.server_user_s:.2f}", f"{row.server_system_s:.2f}"]
        body.append([row.carrier, f"{row.worker_user_s:.2f}", f"{row.worker_system_s:.2f}", *served])
    title = f"CPU seconds a gigabyte, {options.codec}, {options.mb:g} MB; {machine()}"
    print_table(["carrier", "worker, user", "system", "server, user", "system"], body, title=title)


if __name__ == "__main__":
    main()
