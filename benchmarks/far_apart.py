"""Two learners far apart train a byte-level GPT on real text: DDP, torchft's DiLoCo, and psgc's, one job after the other. Loss, bytes and seconds.

    python benchmarks/far_apart.py                                     bytes and losses over links without a limit
    python benchmarks/far_apart.py --mbit 10 --delay-ms 50 --steps 100
    python benchmarks/far_apart.py --systems "psgc none,psgc int4,psgc streaming" --every 25 --json

Needs root (``testbed.py``). Every system trains the same model from the same seed on the same batches, by AdamW; those that exchange rarely do so once in
``--every`` steps, by an outer step of SGD with Nesterov momentum (lr 0.7, momentum 0.9).

    systems  ddp: torch's DistributedDataParallel over gloo; torchft: its DiLoCo over gloo, where torchft is installed; psgc CODEC: psgc's DiLoCo;
             psgc streaming: int4 in 4 fragments that travel for 5 steps each, of which half of a rank's own progress stays (mix 0.5)

"sent" is what one host sent over its link in the whole run, connecting included; "loss" is that of validation, in nats a byte, after the last exchange;
"memory" what a learner's process holds at the end, beyond what it held before the model was made. Seconds are those of training, the last exchange included.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
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
from testbed import Member, Testbed, TestbedError, everywhere, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

LEARNERS: Final = 2
SYSTEMS: Final = "ddp,torchft,psgc none,psgc bf16,psgc int4,psgc streaming"
PORT: Final = 9140
OUTER: Final = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
BATCH: Final = 8  # sequences a learner and step


@dataclass(frozen=True, slots=True)
class Row:
    """One system. sent_bytes: by a host in the whole run; memory_bytes: -1 where it cannot be told."""

    system: str
    steps: int
    seconds: float
    sent_bytes: int
    loss: float
    memory_bytes: int


# in the learners' processes


def model_and_optimizer() -> tuple[Any, Any]:
    import torch
    from gpt_model import Gpt, GptConfig

    torch.manual_seed(0)
    model = Gpt(GptConfig())
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def inner_steps(model: Any, run: Any, optimizer: Any, steps: int, learner: int) -> None:
    import torch
    from text_data import batch_of, load_text

    text, _ = load_text()
    draw = torch.Generator().manual_seed(10 + learner)
    for _ in range(steps):
        x, y = batch_of(text, BATCH, 128, draw)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def validation_loss(model: Any) -> float:
    import torch
    from text_data import batch_of, load_text

    _, text = load_text()
    draw, total = torch.Generator().manual_seed(1), 0.0
    with torch.no_grad():
        for _ in range(8):
            x, y = batch_of(text, 16, 128, draw)
            total += float(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return total / 8


def by_ddp(steps: int, learner: int) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=learner, world_size=LEARNERS)
    model, optimizer = model_and_optimizer()
    inner_steps(model, torch.nn.parallel.DistributedDataParallel(model), optimizer, steps, learner)
    dist.barrier()
    return model


def by_torchft(steps: int, every: int, learner: int, address: str) -> Any:
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model, optimizer = model_and_optimizer()
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    store = TCPStore(address, PORT + 1, is_master=True, wait_for_workers=False)
    hour = datetime.timedelta(hours=1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=hour), load_state_dict=None, state_dict=None, min_replica_size=LEARNERS, use_async_quorum=False, timeout=hour,
        quorum_timeout=hour, connect_timeout=hour, rank=0, world_size=1, store_addr=address, store_port=PORT + 1,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"], replica_id=f"learner{learner}", hostname=address,
        init_sync=False,
    )  # fmt: skip
    try:
        with DiLoCo(manager, [model], optimizer, outer, sync_every=every):
            inner_steps(model, model, optimizer, steps, learner)
    finally:
        manager.shutdown(wait=False)
    del store
    return model


def by_psgc(steps: int, every: int, how: str) -> Any:
    import psgc.torch as psgc

    psgc.init()
    model, optimizer = model_and_optimizer()
    more: dict[str, Any] = (
        {"fragments": 4, "delay": min(5, every - 1), "mix": 0.5, "codec": "int4"} if how == "streaming" else {"codec": how}
    )
    with psgc.DiLoCo(model, optimizer, every=every, **more):
        inner_steps(model, model, optimizer, steps, psgc.rank())
    psgc.shutdown()
    return model


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(system: str, steps: int, every: int, folder: Path) -> None:
    """One learner, which writes what it measured."""
    import torch

    torch.set_num_threads(1)
    learner, addresses = int(os.environ["TESTBED_HOST"]), os.environ["TESTBED_ADDRESSES"].split(",")
    kind, _, how = system.partition(" ")
    before, sent, began = resident_bytes(), interface_bytes()[0], time.monotonic()
    if kind == "ddp":
        model = by_ddp(steps, learner)
    elif kind == "torchft":
        model = by_torchft(steps, every, learner, addresses[learner])
    else:
        model = by_psgc(steps, every, how)
    took, moved, held = time.monotonic() - began, interface_bytes()[0] - sent, resident_bytes() - before
    measured = {"seconds": took, "sent_bytes": moved, "memory_bytes": held, "loss": validation_loss(model)}
    (folder / f"{learner}.json").write_text(json.dumps(measured))


# in the benchmark's own process


def measure(system: str, steps: int, every: int, mbit: float, delay_ms: float) -> Row:
    """One job. Raises TestbedError if it fails."""
    with tempfile.TemporaryDirectory(prefix="psgc-far-") as name, Testbed(LEARNERS, mbit / 1e3 if mbit else None, delay_ms=delay_ms) as bed:
        folder = Path(name)
        script = str(Path(__file__).resolve())
        command = [sys.executable, script, "--work", system, "--steps", str(steps), "--every", str(every), "--to", name]
        own = {
            "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "PSGC_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if system.startswith("psgc"):
            members = psgc_job(bed, command, servers=LEARNERS, server_hosts=0, extra=own)
        else:
            own["TORCHFT_LIGHTHOUSE"] = f"http://{bed.addresses[0]}:{PORT + 2}"
            members = [Member(one.name, one.host, one.argv, {**one.env, **own}) for one in everywhere(bed, command, 1)]
            if system == "torchft":
                lighthouse = [sys.executable, "-c", LIGHTHOUSE, f"[::]:{PORT + 2}"]
                members.insert(0, Member("lighthouse", 0, lighthouse, {**os.environ, **own}, service=True))
        status = run_members(bed, members)
        if status:
            raise TestbedError(f"{system}: the job ended with status {status}; what it said is above")
        found = [json.loads((folder / f"{learner}.json").read_text()) for learner in range(LEARNERS)]
    return Row(
        system, steps, max(one["seconds"] for one in found), max(one["sent_bytes"] for one in found), sum(one["loss"] for one in found) / LEARNERS,
        max(one["memory_bytes"] for one in found),
    )  # fmt: skip


LIGHTHOUSE: Final = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=2, join_timeout_ms=60000)
time.sleep(1e6)
"""


def tell(rows: Sequence[Row], title: str) -> None:
    body = [
        [
            row.system,
            str(row.steps),
            f"{row.seconds:.1f}",
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.loss:.3f}",
            f"{row.memory_bytes / 1e6:.0f}",
        ]
        for row in rows
    ]
    print_table(["system", "steps", "seconds", "sent, MB", "loss", "memory, MB"], body, title=f"{title}; {machine()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=SYSTEMS, help=f"with commas (default: {SYSTEMS})")
    parser.add_argument("--steps", type=int, default=200, help="of each learner (default: 200)")
    parser.add_argument("--every", type=int, default=50, help="steps between two exchanges, of all but ddp (default: 50)")
    parser.add_argument("--mbit", type=float, default=0.0, help="of each learner's link, each way; 0: without a limit (default)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, between the learners (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, options.every, options.to)
        return
    systems = options.systems.split(",")
    unknown = [one for one in systems if one.partition(" ")[0] not in ("ddp", "torchft", "psgc")]
    if unknown or not 1 <= options.every <= options.steps:
        parser.error(
            f"{', '.join(unknown) or options.every}: expected systems ddp, torchft, 'psgc CODEC', 'psgc streaming', and every from 1 to --steps"
        )
    if "torchft" in systems and importlib.util.find_spec("torchft") is None:
        print("far_apart: torchft is not installed, and left out", file=sys.stderr)
        systems.remove("torchft")
    try:
        rows = [measure(system, options.steps, options.every, options.mbit, options.delay_ms) for system in systems]
    except TestbedError as error:
        sys.exit(f"far_apart: {error}")
    if options.json:
        document = {
            "hardware": machine(),
            "mbit": options.mbit,
            "delay_ms": options.delay_ms,
            "every": options.every,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(document))
    else:
        tell(
            rows,
            f"every {options.every}, " + (f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms" if options.mbit else "links without a limit"),
        )


if __name__ == "__main__":
    main()
