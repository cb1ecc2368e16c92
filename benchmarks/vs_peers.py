"""psgc's ways of synchronising beside DDP's, in rotation in the same processes: seconds, bytes and CPU seconds a step, each with its loss.

    python benchmarks/vs_peers.py                                        this machine, without limits: servers over TCP and shared memory, and none
    python benchmarks/vs_peers.py --links 1,0.1 --modes tcp              two hosts behind links of 1 and of 0.1 Gbit/s (needs root: ``testbed.py``)
    python benchmarks/vs_peers.py --models many --systems "ddp none,psgc none" --json

Two workers train copies of one model from the same seed on the same data, one copy for each system; copies take a step each in turn, so a machine that
becomes slower does so for all of them. A step is forward, backward, synchronization and the optimizer's step; its time is the slower worker's.

    models   large: 25.2 M parameters in 12 tensors; many: 8.9 M in 400
    modes    tcp, shm: a server each for two workers, over TCP or shared memory (behind links: a server beside each worker); none: workers alone
    systems  ddp none, ddp fp16, ddp powersgd: torch's DistributedDataParallel over gloo with its hooks; psgc CODEC: DistributedOptimizer;
             psgc CODEC overlapped: with overlapped_step=True

"CPU" is what the whole machine worked in a step, so nothing else should run on it; "sent" is what a worker's host sent over its link. Before any time
counts, each lossless copy must equal DDP's, parameter by parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from slow_links import interface_bytes
from testbed import Testbed, TestbedError, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

WORKERS: Final = 2
WARM_UP: Final = 4  # steps: layouts are agreed in the first, and DDP's PowerSGD begins with the third
GLOO_PORT: Final = 9100
MODES: Final = ("tcp", "shm", "none")
SYSTEMS: Final = "ddp none,ddp fp16,ddp powersgd,psgc none,psgc bf16,psgc int8,psgc onebit,psgc topk"
RANK: Final = 4  # PowerSGD's
TOLERANCE: Final = 1e-5  # between lossless copies after the warm-up, relative to their largest parameter: sums of two are exact, optimizers differ in nothing


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one mode at one link (Gbit/s; 0: without a limit). sent_bytes: by a worker's host, -1 where its link is not its own."""

    model: str
    mode: str
    gbps: float
    system: str
    median_s: float
    best_s: float
    cpu_s: float
    sent_bytes: float
    loss: float


# in the workers' processes


def model_of(name: str) -> tuple[Any, int]:
    """Residual layers; "large" has 6 of 2048 x 2048, "many" 200 of 210 x 210, each with its bias. Returns the model and its width."""
    import torch
    from torch import nn

    width, depth = {"large": (2048, 6), "many": (210, 200)}[name]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.relu(layer(x)) / depth
            return x

    torch.manual_seed(0)
    return Residual(), width


def lossless(system: str) -> bool:
    return system in ("ddp none", "psgc none", "psgc none overlapped")


class Copy:
    """A model that one system trains."""

    def __init__(self, system: str, name: str) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        self.system = system
        self.model, self.width = model_of(name)
        self.run: Any = self.model
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=20.0, momentum=0.9)
        self.seconds: list[float] = []
        self.cpu_s = self.loss = 0.0
        self.sent = 0
        kind, codec, *how = system.split()
        if kind == "psgc":
            import psgc.torch as psgc

            named = [
                (f"{system} {parameter}", value) for parameter, value in self.model.named_parameters()
            ]  # a job has one tensor of a name
            self.optimizer = psgc.DistributedOptimizer(self.optimizer, named, compression=codec, overlapped_step=how == ["overlapped"])
            return
        # one bucket for PowerSGD: over gloo, several mix up their collectives (each waits for its own before it starts the next)
        self.run = torch.nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=4096 if codec == "powersgd" else None)
        if codec == "fp16":
            self.run.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif codec == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
            self.run.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self, x: Any, y: Any) -> float:
        """Seconds."""
        began = time.monotonic()
        self.optimizer.zero_grad()
        loss = (self.run(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        took = time.monotonic() - began
        self.loss = float(loss.detach())
        return took


def machine_cpu_s() -> float:
    """What all processes of the machine have worked so far."""
    user, nice, system, *_ = (int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def differences(copies: Sequence[Copy]) -> list[str]:
    """Lossless copies that do not equal the first one."""
    import torch

    exact = [copy for copy in copies if lossless(copy.system)]
    found = []
    for copy in exact[1:]:
        for own, other in zip(copy.model.parameters(), exact[0].model.parameters(), strict=True):
            if not torch.allclose(own, other, rtol=0, atol=TOLERANCE * float(other.detach().abs().max())):
                found.append(copy.system)
                break
    return found


def work(name: str, systems: Sequence[str], steps: int, out: Path) -> None:
    """One worker; rank 0 writes what all of them measured."""
    import torch
    import torch.distributed as dist

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    rank = psgc.rank()
    dist.init_process_group("gloo", rank=rank, world_size=psgc.size())
    copies = [Copy(system, name) for system in systems]
    teacher = torch.randn(copies[0].width, copies[0].width, generator=torch.Generator().manual_seed(1)) / copies[0].width ** 0.5
    draw = torch.Generator().manual_seed(2 + rank)
    has_link = "TESTBED_HOST" in os.environ
    wrong: list[str] = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            wrong = differences(copies)
        x = torch.randn(16, copies[0].width, generator=draw)
        y = x @ teacher
        for copy in copies[step % len(copies) :] + copies[: step % len(copies)]:  # no system always follows the same one
            dist.barrier()
            sent, cpu_s = interface_bytes()[0] if has_link else 0, machine_cpu_s()
            took = copy.step(x, y)
            dist.barrier()
            if step >= WARM_UP:
                copy.seconds.append(took)
                copy.cpu_s += machine_cpu_s() - cpu_s
                copy.sent += interface_bytes()[0] - sent if has_link else 0
    slowest = torch.tensor([copy.seconds for copy in copies], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        measured = [
            {
                "system": copy.system, "median_s": statistics.median(times), "best_s": min(times), "cpu_s": copy.cpu_s / steps,
                "sent_bytes": copy.sent / steps if has_link else -1, "loss": copy.loss,
            }
            for copy, times in zip(copies, slowest.tolist(), strict=True)
        ]  # fmt: skip
        out.write_text(json.dumps({"wrong": wrong, "rows": measured}))
    dist.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


# in the benchmark's own process


def measure(name: str, mode: str, gbps: float, systems: Sequence[str], steps: int) -> list[Row]:
    """One job, in which all systems take turns. Raises TestbedError if it fails, or a lossless copy is wrong."""
    with tempfile.TemporaryDirectory(prefix="psgc-peers-") as folder:
        out = Path(folder) / "measured.json"
        command = [
            sys.executable, str(Path(__file__).resolve()), "--work", name, "--systems", ",".join(systems), "--steps", str(steps), "--to", str(out),
        ]  # fmt: skip
        status = on_links(command, mode, gbps) if gbps else on_this_machine(command, mode)
        if status:
            raise TestbedError(f"{name}, {mode}, {gbps:g} Gbit/s: the job ended with status {status}; what it said is above")
        found = json.loads(out.read_text())
    if found["wrong"]:
        raise TestbedError(f"{name}, {mode}: {' and '.join(found['wrong'])} differ from {systems[0]} after {WARM_UP} steps")
    return [Row(name, mode, gbps, **measured) for measured in found["rows"]]


def on_links(command: Sequence[str], mode: str, gbps: float) -> int:
    with Testbed(WORKERS, gbps) as bed:
        extra = {
            "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": "eth0", "PSGC_LOG_LEVEL": "error",
        }  # fmt: skip
        return run_members(bed, psgc_job(bed, command, servers=0 if mode == "none" else WORKERS, server_hosts=0, extra=extra))


def on_this_machine(command: Sequence[str], mode: str) -> int:
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(GLOO_PORT), "PSGC_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1",
        "PSGC_TRANSPORT": "tcp" if mode == "tcp" else "auto",
    }  # fmt: skip
    servers = "0" if mode == "none" else "1"
    run = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(WORKERS), "--servers", servers, "--", *command]
    return subprocess.run(run, env=env, check=False, stdout=sys.stderr).returncode


def tell(rows: Sequence[Row]) -> None:
    body = [
        [
            row.model, row.mode, f"{row.gbps:g}" if row.gbps else "no limit", row.system, f"{row.median_s:.3f}", f"{row.best_s:.3f}", f"{row.cpu_s:.2f}",
            "" if row.sent_bytes < 0 else f"{row.sent_bytes / 1e6:.2f}", f"{row.loss:.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    print_table(["model", "mode", "Gbit/s", "system", "step, s", "best", "CPU, s", "sent, MB", "loss"], body, title=machine())


def draw_chart(rows: Sequence[Row], path: Path) -> None:
    """Seconds a step against the link's rate, a line for each system and mode."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        limited = [row for row in rows if row.model == model and row.gbps]
        for mode, system in dict.fromkeys((row.mode, row.system) for row in limited):
            line = sorted((row.gbps, row.median_s) for row in limited if (row.mode, row.system) == (mode, system))
            label = system if system.startswith("ddp") else f"{system}, {mode}"
            axis.plot(
                [gbps for gbps, _ in line],
                [seconds for _, seconds in line],
                "--" if system.startswith("ddp") else "-",
                marker="o",
                label=label,
            )
        axis.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="step, s", title=model)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", default="0", help="Gbit/s of each host's link, with commas; 0: this machine, without a limit (default: 0)"
    )
    parser.add_argument(
        "--modes", default=",".join(MODES), help=f"with commas, of {', '.join(MODES)}; behind links shm is tcp, and left out"
    )
    parser.add_argument("--models", default="large,many", help="with commas, of large, many")
    parser.add_argument("--systems", default=SYSTEMS, help=f"with commas (default: {SYSTEMS})")
    parser.add_argument("--steps", type=int, default=20, help="that count, of each system")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--plot", type=Path, help="draw step time against bandwidth into this file (needs two links)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    systems = options.systems.split(",")
    if options.work:
        work(options.work, systems, options.steps, options.to)
        return
    links, modes, models = [float(text) for text in options.links.split(",")], options.modes.split(","), options.models.split(",")
    unknown = [one for one in modes if one not in MODES] + [one for one in models if one not in ("large", "many")]
    unknown += [one for one in systems if one.partition(" ")[0] not in ("ddp", "psgc")]
    if unknown or options.steps < 1:
        parser.error(
            f"{', '.join(unknown) or options.steps}: expected modes {', '.join(MODES)}, models large, many, systems 'ddp ...', 'psgc ...'"
        )
    rows: list[Row] = []
    try:
        for name in models:
            for gbps in links:
                for mode in modes if not gbps else [mode for mode in modes if mode != "shm"]:
                    rows += measure(name, mode, gbps, systems, options.steps)
    except TestbedError as error:
        sys.exit(f"vs_peers: {error}")
    if options.plot:
        draw_chart(rows, options.plot)
    if options.json:
        print(json.dumps({"hardware": machine(), "rows": [asdict(row) for row in rows]}))
    else:
        tell(rows)


if __name__ == "__main__":
    main()
