"""A byte-level GPT under FSDP2, sharded within hosts of two ranks: torch's own HSDP beside psgc between the hosts, in rotation in the same processes.

    python benchmarks/sharded.py                            this machine, without limits
    python benchmarks/sharded.py --links 1,0.1              two hosts behind links of 1 and of 0.1 Gbit/s (needs root: ``testbed.py``)
    python benchmarks/sharded.py --links 0.1 --mode none --systems "hsdp,psgc int8" --steps 300 --json

Copies of one model train from the same seed on the same data, one for each system, and take a step each in turn. A step is forward, backward, clipping and
the optimizer's step; its time is the slowest rank's. "sent" is what a host sent over its link, "loss" the mean over ranks of the last ten steps. Before any
time counts, psgc's uncompressed copy must equal HSDP's to the bit.
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
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

from slow_links import interface_bytes
from testbed import Testbed, TestbedError, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

HOSTS: Final = 2
OF_A_HOST: Final = 2  # ranks
WARM_UP: Final = 5
LAST: Final = 10  # steps whose loss is told
MODES: Final = ("servers", "none")
SYSTEMS: Final = "hsdp,psgc none,psgc bf16,psgc int8,psgc powersgd:rank=4"
GLOO_PORT: Final = 9120


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one link (Gbit/s; 0: without a limit). sent_bytes: by a host in a step, -1 where its link is not its own."""

    mode: str
    gbps: float
    system: str
    median_s: float
    best_s: float
    sent_bytes: float
    loss: float


# in the workers' processes


class Copy:
    """A model that one system trains."""

    def __init__(self, system: str, mesh: Any) -> None:
        import torch
        from gpt_model import Gpt, GptConfig
        from torch.distributed.fsdp import fully_shard

        import psgc.torch as psgc

        self.system = system
        kind, _, codec = system.partition(" ")
        torch.manual_seed(0)
        self.model: Any = Gpt(GptConfig())
        own = mesh if kind == "hsdp" else mesh["shard"]
        for block in self.model.blocks:
            fully_shard(block, mesh=own)
        fully_shard(self.model, mesh=own)
        if kind == "psgc":
            psgc.fsdp_hook(self.model, codec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent = 0

    def step(self, x: Any, y: Any) -> float:
        """Seconds."""
        from torch import nn

        began = time.monotonic()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        took = time.monotonic() - began
        self.losses.append(float(loss.detach()))
        return took


def equal(one: Copy, other: Copy) -> bool:
    """Whether this rank's shards are."""
    import torch

    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def work(systems: Sequence[str], steps: int, out: Path) -> None:
    """One worker; rank 0 writes what all of them measured."""
    import torch
    import torch.distributed as dist
    from text_data import batch_of, load_text
    from torch.distributed.device_mesh import init_device_mesh

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    mesh = init_device_mesh("cpu", (HOSTS, OF_A_HOST), mesh_dim_names=("replicate", "shard"))
    copies = [Copy(system, mesh) for system in systems]
    text, _ = load_text()
    draw = torch.Generator().manual_seed(2 + dist.get_rank())
    has_link = "TESTBED_HOST" in os.environ
    wrong = False
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            exact = [copy for copy in copies if copy.system in ("hsdp", "psgc none")]
            wrong = any(not equal(copy, exact[0]) for copy in exact[1:])
        x, y = batch_of(text, 4, 128, draw)
        for copy in copies[step % len(copies) :] + copies[: step % len(copies)]:  # no system always follows the same one
            dist.barrier()
            sent = interface_bytes()[0] if has_link else 0
            took = copy.step(x, y)
            dist.barrier()
            if step >= WARM_UP:
                copy.seconds.append(took)
                copy.sent += interface_bytes()[0] - sent if has_link else 0
    slowest = torch.tensor([copy.seconds for copy in copies], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    told = torch.tensor([[statistics.fmean(copy.losses[-LAST:]) for copy in copies], [float(wrong)] * len(copies)], dtype=torch.float64)
    dist.all_reduce(told)
    if psgc.rank() == 0:
        losses = (told[0] / psgc.size()).tolist()
        measured = [
            {
                "system": copy.system, "median_s": statistics.median(times), "best_s": min(times), "sent_bytes": copy.sent / steps if has_link else -1,
                "loss": loss,
            }
            for copy, times, loss in zip(copies, slowest.tolist(), losses, strict=True)
        ]  # fmt: skip
        out.write_text(json.dumps({"wrong": bool(told[1].any()), "rows": measured}))
    dist.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


# in the benchmark's own process


def measure(mode: str, gbps: float, systems: Sequence[str], steps: int) -> list[Row]:
    """One job, in which all systems take turns. Raises TestbedError if it fails, or psgc's uncompressed copy is wrong."""
    with tempfile.TemporaryDirectory(prefix="psgc-sharded-") as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--work", str(out), "--systems", ",".join(systems), "--steps", str(steps)]
        status = on_links(command, mode, gbps) if gbps else on_this_machine(command, mode)
        if status:
            raise TestbedError(f"{mode}, {gbps:g} Gbit/s: the job ended with status {status}; what it said is above")
        found = json.loads(out.read_text())
    if found["wrong"]:
        raise TestbedError(f"{mode}: psgc none differs from hsdp after {WARM_UP} steps")
    return [Row(mode, gbps, **measured) for measured in found["rows"]]


def on_links(command: Sequence[str], mode: str, gbps: float) -> int:
    with Testbed(HOSTS, gbps) as bed:
        extra = {
            "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": "eth0", "PSGC_LOG_LEVEL": "error",
        }  # fmt: skip
        servers = 0 if mode == "none" else HOSTS
        return run_members(bed, psgc_job(bed, command, per_host=OF_A_HOST, servers=servers, server_hosts=0, extra=extra))


def on_this_machine(command: Sequence[str], mode: str) -> int:
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(GLOO_PORT), "PSGC_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    workers, servers = str(HOSTS * OF_A_HOST), "0" if mode == "none" else "1"
    run = [sys.executable, "-m", "psgc.launch", "run", "--workers", workers, "--servers", servers, "--", *command]
    return subprocess.run(run, env=env, check=False, stdout=sys.stderr).returncode


def tell(rows: Sequence[Row]) -> None:
    body = [
        [
            row.mode, f"{row.gbps:g}" if row.gbps else "no limit", row.system, f"{row.median_s:.3f}", f"{row.best_s:.3f}",
            "" if row.sent_bytes < 0 else f"{row.sent_bytes / 1e6:.2f}", f"{row.loss:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    print_table(["mode", "Gbit/s", "system", "step, s", "best", "sent, MB", "loss"], body, title=machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", default="0", help="Gbit/s of each host's link, with commas; 0: this machine, without a limit (default: 0)"
    )
    parser.add_argument("--mode", default=",".join(MODES), help=f"with commas, of {', '.join(MODES)}: psgc with servers, or workers alone")
    parser.add_argument("--systems", default=SYSTEMS, help=f"with commas: hsdp, or 'psgc CODEC' (default: {SYSTEMS})")
    parser.add_argument("--steps", type=int, default=40, help="that count, of each system (default: 40)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    systems, modes = options.systems.split(","), options.mode.split(",")
    if options.work:
        work(systems, options.steps, options.work)
        return
    unknown = [one for one in modes if one not in MODES] + [one for one in systems if one.partition(" ")[0] not in ("hsdp", "psgc")]
    if unknown or options.steps < LAST:
        parser.error(
            f"{', '.join(unknown) or options.steps}: expected modes {', '.join(MODES)}, systems hsdp, 'psgc CODEC', at least {LAST} steps"
        )
    try:
        rows = [
            row for gbps in map(float, options.links.split(",")) for mode in modes for row in measure(mode, gbps, systems, options.steps)
        ]
    except TestbedError as error:
        sys.exit(f"sharded: {error}")
    if options.json:
        print(json.dumps({"hardware": machine(), "rows": [asdict(row) for row in rows]}))
    else:
        tell(rows)


if __name__ == "__main__":
    main()
