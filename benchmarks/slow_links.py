"""What synchronising takes over slow links, in seconds and in bytes, beside DDP.  Needs root (``testbed.py``).

    python benchmarks/slow_links.py                                     all cases, some minutes
    python benchmarks/slow_links.py --cases 100,broadcast [--steps 3]   some of them

Two hosts, each with a worker and a server, which share memory on their host and speak TCP to the other; the scheduler is on host 0. A module
whose backward costs next to nothing is stepped with gradients that say who made them when, so that every element of every mean is checked
(outside what is timed). Bytes are those of each host's interface as the kernel counts them, headers and acknowledgements included; "needed" is
what one exchange must move over it: a host sends its worker's payloads for the other host's server and its server's results for the other
host's worker, and receives as much.

    100, 100-bf16   25.2 M parameters over 100 Mbit/s, and DDP (with its bf16 hook) in the same run
    broadcast       broadcast_parameters of them: one host sends twice what the other does, for both servers' results start from it
    10, 1           0.5 M parameters over 10 Mbit/s, 0.1 M over 1 Mbit/s
    loss            1 M parameters over 20 Mbit/s that lose 1 % of their packets
    cut             1 M parameters over 20 Mbit/s; one host is cut off for 20 s in the middle of the second step
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from testbed import JOB_PORT, Member, Testbed, TestbedError, psgc_job, run_members

HOSTS: Final = 2
SIDE: Final = 1024  # of the matrices that the larger modules are made of
CUT_S: Final = 20.0


@dataclass(frozen=True)
class Case:
    """numel: of the module's parameters. systems: what is run, one after the other. cut_after_s: from the second step's begin on."""

    title: str
    mbit: float
    numel: int
    systems: tuple[str, ...]
    loss: float = 0.0
    broadcast: bool = False
    cut_after_s: float | None = None


CASES: Final = {
    "100": Case("100 Mbit/s", 100, 24 * SIDE * SIDE, ("psgc none", "ddp none")),
    "100-bf16": Case("100 Mbit/s", 100, 24 * SIDE * SIDE, ("psgc bf16", "ddp bf16")),
    "broadcast": Case("100 Mbit/s, broadcast_parameters", 100, 24 * SIDE * SIDE, ("psgc none",), broadcast=True),
    "10": Case("10 Mbit/s", 10, 512 * SIDE, ("psgc none", "psgc bf16", "ddp none")),
    "1": Case("1 Mbit/s", 1, 96 * SIDE, ("psgc none", "psgc bf16")),
    "loss": Case("20 Mbit/s, 1 % of packets lost", 20, SIDE * SIDE, ("psgc none", "ddp none"), loss=0.01),
    "cut": Case("20 Mbit/s, cut for 20 s", 20, SIDE * SIDE, ("psgc none",), cut_after_s=0.4),
}


# in the members' processes


def interface_bytes() -> tuple[int, int]:
    """Sent and received by this host's link so far. Not from /sys, which shows the network that it was mounted in."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    numbers = [int(word) for word in line.partition(":")[2].split()]
    return numbers[8], numbers[0]


def module_of(numel: int) -> Any:
    """Matrices, whose sum is the loss: the gradient of each element is what the loss is multiplied by."""
    import torch

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [min(SIDE * SIDE, numel - lo) for lo in range(0, numel, SIDE * SIDE)]
            self.weights = torch.nn.ParameterList([torch.zeros(size) for size in sizes])

        def forward(self, factor: float) -> Any:
            return factor * sum(weight.sum() for weight in self.weights)

    return Sum()


def bf16_hook(_, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are text
    """torch's own bf16_compress_hook, but for its refusal to run over gloo, which sums bfloat16 as well."""
    import torch

    narrow = bucket.buffer().to(torch.bfloat16).div_(torch.distributed.get_world_size())

    def widen(future: Any) -> Any:
        return bucket.buffer().copy_(future.value()[0])

    return torch.distributed.all_reduce(narrow, async_op=True).get_future().then(widen)


def factor(rank: int, step: int) -> float:
    """A small whole number, which bfloat16 holds, as it does the mean of two of them."""
    return float(2 * (rank + 1) * (step % 5 + 1))


def work(system: str, numel: int, steps: int, broadcast: bool, folder: Path) -> None:
    """One worker: its times, its link's bytes and what was wrong, into a file."""
    import torch

    torch.set_num_threads(1)
    name, _, codec = system.partition(" ")
    report: dict[str, Any] = {"seconds": [], "wrong": 0}
    model = module_of(numel)
    if name == "psgc":
        import psgc.torch as psgc

        psgc.init()
        rank, size, barrier = psgc.rank(), psgc.size(), psgc.barrier
        run: Any = model
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), compression=codec)
    else:
        torch.distributed.init_process_group("gloo")
        rank, size, barrier = torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.barrier
        run = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if codec == "bf16":
            run.register_comm_hook(None, bf16_hook)
    if broadcast:
        values = {"w": torch.full((numel,), float(rank + 1))}
        barrier()
        report["before"], began = interface_bytes(), time.monotonic()
        psgc.broadcast_parameters(values, root_rank=0)
        report["seconds"].append(time.monotonic() - began)
        barrier()
        report["after"] = interface_bytes()
        report["wrong"] = int((values["w"] != 1).sum())
    for step in range(0 if broadcast else steps + 1):  # the first settles the layout, and is not counted
        barrier()
        if step == 1:
            report["before"] = interface_bytes()
        optimizer.zero_grad()
        (folder / f"begun-{rank}-{step}").touch()
        began = time.monotonic()
        run(factor(rank, step)).backward()
        optimizer.step()
        took = time.monotonic() - began
        barrier()
        report["after"] = interface_bytes()
        if step:
            report["seconds"].append(took)
        mean = sum(factor(other, step) for other in range(size)) / size
        report["wrong"] += sum(int((weight.grad != mean).sum()) for weight in model.parameters())
    if name == "psgc":
        report["resent"] = psgc.current_session().statistics()["resent"]
        psgc.shutdown()
    else:
        torch.distributed.destroy_process_group()
    (folder / f"worker-{rank}.json").write_text(json.dumps(report))


# in the benchmark's own process


def members(bed: Testbed, system: str, arguments: Sequence[str]) -> list[Member]:
    """The processes of one run."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", system, *arguments]
    if system.startswith("psgc"):
        return psgc_job(bed, command, servers=HOSTS, server_hosts=0)
    env = {
        **os.environ, "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(JOB_PORT), "WORLD_SIZE": str(HOSTS), "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [Member(f"rank {rank}", rank, command, {**env, "RANK": str(rank)}) for rank in range(HOSTS)]


def needed_bytes(case: Case, system: str) -> int:
    """What one exchange sends and receives over each host's link, both together."""
    payload = case.numel * (2 if system.endswith("bf16") else 4)
    if case.broadcast:  # half of the root's goes to the other host; from each server, the result of its half to the other host
        return payload * 3 // 2
    return 2 * payload


@contextmanager
def cutting(case: Case, bed: Testbed, folder: Path) -> Iterator[None]:
    """Cut host 1 off once the second step has begun there, if that is the case's."""
    after_s, over = case.cut_after_s, threading.Event()
    if after_s is None:
        yield
        return

    def cut() -> None:
        while not (folder / "begun-1-2").exists():
            if over.wait(0.01):
                return
        if not over.wait(after_s):
            with bed.cut_off(1):
                over.wait(CUT_S)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(case: Case, system: str, steps: int) -> dict[str, Any]:
    """One system over one case's links. Raises TestbedError if it fails or sums are wrong."""
    with tempfile.TemporaryDirectory() as name, Testbed(HOSTS, case.mbit / 1000, loss=case.loss) as bed:
        folder = Path(name)
        arguments = ["--numel", str(case.numel), "--steps", str(steps), "--folder", name, *(["--broadcast"] if case.broadcast else [])]
        with cutting(case, bed, folder):
            status = run_members(bed, members(bed, system, arguments))
        if status:
            raise TestbedError(f"{case.title}, {system}: ended with status {status}")
        reports = [json.loads((folder / f"worker-{rank}.json").read_text()) for rank in range(HOSTS)]
    wrong = sum(report["wrong"] for report in reports)
    if wrong:
        raise TestbedError(f"{case.title}, {system}: {wrong} elements are wrong")
    counted = 1 if case.broadcast else steps
    moved = [sum(after - before for before, after in zip(r["before"], r["after"], strict=True)) / counted for r in reports]
    return {
        "median_s": statistics.median(max(pair) for pair in zip(*(report["seconds"] for report in reports), strict=True)),
        "longest_s": max(max(report["seconds"]) for report in reports),
        "moved": moved,
        "needed": needed_bytes(case, system),
        "resent": sum(report.get("resent", 0) for report in reports),
    }


def row(case: Case, system: str, got: dict[str, Any]) -> str:
    ratios = " and ".join(f"{moved / got['needed']:.3f}" for moved in got["moved"])
    return (
        f"| {case.title} | {case.numel / 1e6:.1f} M | {system} | {got['median_s']:.2f} | {got['longest_s']:.2f} "
        f"| {got['needed'] / 1e6:.2f} | {ratios} | {got['resent']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas, of {', '.join(CASES)}; default all")
    parser.add_argument("--steps", type=int, default=3, help="counted ones, after one that is not (default: 3)")
    for hidden, kind in (("--work", str), ("--numel", int), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--broadcast", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.numel, options.steps, options.broadcast, options.folder)
        return
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown or options.steps < 1:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}" if unknown else "--steps: expected at least 1")
    print("| link | parameters | system | step, median s | longest | needed MB a step | moved over needed, by host | resent |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    try:
        for name in options.cases.split(","):
            for system in CASES[name].systems:
                print(row(CASES[name], system, measure(CASES[name], system, options.steps)), flush=True)
    except TestbedError as error:
        print(f"slow_links: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
