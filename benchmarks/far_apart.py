"""Learners far apart train a byte-level GPT on real text: DDP, torchft's DiLoCo, and what psgc has, one job after the other. Loss, bytes and seconds.

    python benchmarks/far_apart.py                                     bytes and losses over links without a limit
    python benchmarks/far_apart.py --mbit 10 --delay-ms 50 --steps 100
    python benchmarks/far_apart.py --systems "psgc none,psgc int4,psgc streaming" --every 25 --json
    python benchmarks/far_apart.py --mbit 10 --delay-ms 50 --steps 2000 --learners 4 --results far.jsonl     in slices: start it again, and it goes on
    python benchmarks/far_apart.py --results far.jsonl --report --plot far.svg                               what is there, as tables and a chart

Needs root (``testbed.py``). Every system trains the same model from the same seed on the same batches; those that exchange rarely do so once in ``--every``
steps, by an outer step of SGD with Nesterov momentum (lr 0.7, momentum 0.9). All but DeMo take AdamW inside.

    ddp               torch's DistributedDataParallel over gloo
    torchft           its DiLoCo over gloo, where torchft is installed, a message for each parameter, as it is by default; "torchft buckets": with its
                      use_bucketization, one for all; "torchft streaming": that, in fragments as below; "torchft slow", "torchft killed": as below
    psgc CODEC        psgc's DiLoCo
    psgc streaming    int4 in 5 fragments that travel for 5 steps each, of which half of a rank's own progress stays (mix 0.5); "psgc streaming none":
                      uncompressed
    psgc servers      int4, the outer step on servers
    psgc sparseloco   the codec of that name, and the mean as the outer step
    psgc demo         DeMo, which exchanges in every step
    psgc decoupled    learners around a syncer, int4; "decoupled slow": learner 1 takes ten times as long for a step; "decoupled killed": it is gone
                      after a quarter of its steps. Their figures are of the other learners.

"sent" is what one host sent over its link in the whole run, connecting included; "loss" is that of validation, in nats a byte, after the last exchange.
torchft's block ends without one, and four of its five fragments have had steps since theirs: there it is the loss of the learners' mean. "memory" is what
a learner's process holds after its last step, before the last exchange, beyond what it held before the model was made (proportional set size); servers
and syncers are processes of their own. Seconds are from when a learner, with torch imported, begins to meet its peers to when it has left them, the last
exchange included, and without those of ``--curve``, whose points (tokens of all learners, seconds, loss of learner 0) are in the document of ``--json``
and in ``--results``.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

from far_apart_report import LR, draw, runs_of, tables
from slow_links import interface_bytes
from testbed import Member, Testbed, TestbedError, everywhere, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

SYSTEMS: Final = (
    "ddp,torchft,torchft buckets,torchft streaming,torchft slow,torchft killed,psgc none,psgc bf16,psgc int4,psgc streaming none,psgc streaming,"
    "psgc servers,psgc sparseloco,psgc demo,psgc decoupled,psgc decoupled slow,psgc decoupled killed"
)
PORT: Final = 9140
OUTER: Final = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
BATCH: Final = 8  # sequences a learner and step
CONTEXT: Final = 128
TOKEN: Final = "of-this-benchmark"
SLOWER: Final = 10
FRAGMENTS: Final = 5  # of what is called streaming
UNFINISHED: Final = "torchft streaming"  # ends between two exchanges


@dataclass(frozen=True, slots=True)
class Row:
    """One system. sent_bytes: by a host in the whole run; memory_bytes: -1 where it cannot be told. curve: tokens, seconds, loss."""

    system: str
    steps: int
    seconds: float
    sent_bytes: int
    loss: float
    memory_bytes: int
    curve: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same for all systems. curve: steps between two points of the curve; 0: none are taken. lr: of AdamW. again: how often it was run before."""

    steps: int
    every: int
    mbit: float = 0.0
    delay_ms: float = 0.0
    learners: int = 2
    seed: int = 0
    curve: int = 0
    lr: float = LR
    again: int = 0

    def named(self) -> dict[str, Any]:
        """For results, in which the usual rate and a first run are not named."""
        return {name: value for name, value in asdict(self).items() if {"lr": LR, "again": 0}.get(name) != value}


# in the learners' processes


def model_and_optimizer(job: Job) -> tuple[Any, Any]:
    import torch
    from gpt_model import Gpt, GptConfig

    torch.manual_seed(job.seed)
    model = Gpt(GptConfig())
    return model, torch.optim.AdamW(model.parameters(), lr=job.lr)


class Learner:
    """One learner's steps and what it notes on the way. slower: by what factor each step is stretched; ends_at: the step after which it is gone."""

    def __init__(self, job: Job, learner: int, slower: int = 1, ends_at: int = 0) -> None:
        self.job, self.learner, self.slower, self.ends_at = job, learner, slower, ends_at
        self.curve: list[tuple[float, float, float]] = []
        self.paused, self.began, self.held_before, self.held = 0.0, time.monotonic(), held_bytes(), -1

    def train(self, model: Any, run: Any, optimizer: Any) -> None:
        import torch
        from text_data import batch_of, load_text

        text, _ = load_text()
        draw = torch.Generator().manual_seed(1000 * self.job.seed + 10 + self.learner)
        for step in range(1, self.job.steps + 1):
            begun = time.monotonic()
            x, y = batch_of(text, BATCH, CONTEXT, draw)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(run(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            if self.slower > 1:
                time.sleep((self.slower - 1) * (time.monotonic() - begun))
            if step == self.ends_at:
                os._exit(0)  # as one that is killed: nobody is told
            if self.job.curve and step % self.job.curve == 0:
                self._note(step, model)
        at, self.held = time.monotonic(), held_bytes()
        self.paused += time.monotonic() - at

    def _note(self, step: int, model: Any) -> None:
        """Every learner takes the time, so that none waits for the one whose figures count."""
        at = time.monotonic()
        loss = validation_loss(model, 2)
        self.curve.append((step * self.job.learners * BATCH * CONTEXT, at - self.began - self.paused, loss))
        self.paused += time.monotonic() - at


def validation_loss(model: Any, batches: int = 8) -> float:
    import torch
    from text_data import batch_of, load_text

    _, text = load_text()
    draw, total = torch.Generator().manual_seed(1), 0.0
    with torch.no_grad():
        for _ in range(batches):
            x, y = batch_of(text, 16, CONTEXT, draw)
            total += float(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return total / batches


def by_ddp(learner: Learner) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=learner.learner, world_size=learner.job.learners)
    model, optimizer = model_and_optimizer(learner.job)
    learner.train(model, torch.nn.parallel.DistributedDataParallel(model), optimizer)
    dist.barrier()
    return model


def by_torchft(learner: Learner, address: str, how: str) -> Any:
    """how: "" (a message for each parameter), "buckets", "streaming", "slow" or "killed", all but the first with buckets. One that may lose its peer waits for
    it no longer than torchft's own limits, and then goes on alone."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    from psgc.torch.rarely.fragment import parts_of

    model, optimizer = model_and_optimizer(learner.job)
    parts = [torch.nn.ParameterList(part.values()) for part in parts_of(model, FRAGMENTS if how == "streaming" else 1, "far_apart")]
    outer = [torch.optim.SGD(part.parameters(), **OUTER) for part in parts]
    streaming = {"fragment_sync_delay": travels(learner.job), "fragment_update_alpha": 0.5} if how == "streaming" else {}
    store = TCPStore(address, PORT + 1, is_master=True, wait_for_workers=False)
    limit, least = (60, 1) if how == "killed" else (3600, learner.job.learners)
    limits = {"timeout": datetime.timedelta(seconds=limit)}
    manager = Manager(
        pg=ProcessGroupGloo(**limits), load_state_dict=None, state_dict=None, min_replica_size=least, use_async_quorum=False,
        quorum_timeout=limits["timeout"], connect_timeout=limits["timeout"], rank=0, world_size=1, **limits, store_addr=address, store_port=PORT + 1,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"], replica_id=f"learner{learner.learner}", hostname=address,
        init_sync=False,
    )  # fmt: skip
    try:
        with DiLoCo(manager, parts, optimizer, outer, sync_every=learner.job.every, use_bucketization=bool(how), **streaming):
            learner.train(model, model, optimizer)
    finally:
        manager.shutdown(wait=False)
    del store
    return model


def travels(job: Job) -> int:
    """Steps that a fragment of what is called streaming travels."""
    return min(5, job.every // FRAGMENTS - 1)


def by_psgc(learner: Learner, how: str) -> Any:
    import psgc.torch as psgc

    every = learner.job.every
    streaming = {"fragments": FRAGMENTS, "delay": travels(learner.job), "mix": 0.5}
    settings: dict[str, dict[str, Any]] = {
        "streaming": {**streaming, "codec": "int4"},
        "streaming none": {**streaming, "codec": "none"},
        "servers": {"codec": "int4", "on": "servers"},
        "sparseloco": {"codec": "sparseloco", "outer": "average"},
    }
    psgc.init()
    model, optimizer = model_and_optimizer(learner.job)
    if how == "demo":
        psgc.broadcast_parameters(model.state_dict())
        learner.train(model, model, psgc.DeMo(model.named_parameters(), lr=1e-3))
    else:
        with psgc.DiLoCo(model, optimizer, every=every, **settings.get(how, {"codec": how})):
            learner.train(model, model, optimizer)
    psgc.shutdown()
    return model


def by_decoupled(learner: Learner, at: str) -> Any:
    import psgc.torch as psgc

    model, optimizer = model_and_optimizer(learner.job)
    with psgc.Decoupled(model, optimizer, every=learner.job.every, at=at, name=f"learner{learner.learner}", codec="int4"):
        learner.train(model, model, optimizer)
    return model


def held_bytes() -> int:
    """The process's proportional set size."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) * 1024


def disturbed(system: str, learner: int) -> tuple[bool, bool]:
    """Whether this learner is the slow one, and whether it is killed."""
    return learner == 1 and system.endswith(" slow"), learner == 1 and system.endswith(" killed")


def work(system: str, job: Job, folder: Path) -> None:
    """One learner, which writes what it measured."""
    import torch

    torch.set_num_threads(1)
    number, addresses = int(os.environ["TESTBED_HOST"]), os.environ["TESTBED_ADDRESSES"].split(",")
    kind, _, how = system.partition(" ")
    slow, killed = disturbed(system, number)
    learner = Learner(job, number, SLOWER if slow else 1, max(1, job.steps // 4) if killed else 0)
    sent = interface_bytes()[0]
    if kind == "ddp":
        model = by_ddp(learner)
    elif kind == "torchft":
        model = by_torchft(learner, addresses[number], how)
    elif how.startswith("decoupled"):
        model = by_decoupled(learner, f"{addresses[0]}:{PORT}")
    else:
        model = by_psgc(learner, how)
    took, moved, held = time.monotonic() - learner.began - learner.paused, interface_bytes()[0] - sent, learner.held - learner.held_before
    measured = {"seconds": took, "sent_bytes": moved, "memory_bytes": held, "loss": validation_loss(model), "curve": learner.curve}
    (folder / f"{number}.json").write_text(json.dumps(measured))
    if system == UNFINISHED:
        torch.save(model.state_dict(), folder / f"{number}.pt")


# in the benchmark's own process


def measure(system: str, job: Job) -> Row:
    """One job. Raises TestbedError if it fails."""
    gbps = job.mbit / 1e3 if job.mbit else None
    with tempfile.TemporaryDirectory(prefix="psgc-far-") as name, Testbed(job.learners, gbps, delay_ms=job.delay_ms) as bed:
        folder = Path(name)
        script = str(Path(__file__).resolve())
        command = [sys.executable, script, "--work", system, "--job", json.dumps(asdict(job)), "--to", name]
        own = {
            "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "PSGC_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        counted = [learner for learner in range(job.learners) if not any(disturbed(system, learner))]
        if system.startswith("psgc decoupled"):
            members = _around_a_syncer(bed, command, own, job.learners)
        elif system.startswith("psgc"):
            members = psgc_job(bed, command, servers=job.learners, server_hosts=0, extra=own)
        else:
            own["TORCHFT_LIGHTHOUSE"] = f"http://{bed.addresses[0]}:{PORT + 2}"
            members = [Member(one.name, one.host, one.argv, {**one.env, **own}) for one in everywhere(bed, command, 1)]
            if system.startswith("torchft"):
                least = "1" if system.endswith(" killed") else str(job.learners)
                lighthouse = [sys.executable, "-c", LIGHTHOUSE, f"[::]:{PORT + 2}", least]
                members.insert(0, Member("lighthouse", 0, lighthouse, {**os.environ, **own}, service=True))
        status = run_members(bed, members)
        if status:
            raise TestbedError(f"{system}: the job ended with status {status}; what it said is above")
        found = [json.loads((folder / f"{learner}.json").read_text()) for learner in counted]
        loss = of_the_mean(job, folder) if system == UNFINISHED else sum(one["loss"] for one in found) / len(found)
    return Row(
        system, job.steps, max(one["seconds"] for one in found), max(one["sent_bytes"] for one in found), loss,
        max(one["memory_bytes"] for one in found), tuple(tuple(point) for point in found[0]["curve"]),
    )  # fmt: skip


def of_the_mean(job: Job, folder: Path) -> float:
    """The validation loss of the mean of the learners' parameters."""
    import torch

    states = [torch.load(folder / f"{learner}.pt") for learner in range(job.learners)]
    model, _ = model_and_optimizer(job)
    model.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return validation_loss(model)


def _around_a_syncer(bed: Testbed, command: list[str], own: dict[str, str], learners: int) -> list[Member]:
    """A syncer on host 0, and a learner on every host. A slow learner is a service: it is ended with the syncer once the others have ended."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DMLC_", "PSGC_", "BYTEPS_"))} | own
    env["PSGC_TOKEN"] = TOKEN
    syncer = [sys.executable, "-m", "psgc.launch", "syncer", "--listen", f"0.0.0.0:{PORT}", "--rule", f"delayed:learners={learners}"]
    members = [Member("syncer", 0, syncer, env, service=True)]
    slow = command[command.index("--work") + 1].endswith(" slow")
    for host in range(learners):
        members.append(Member(f"learner {host}", host, command, {**env, **bed.environment(host)}, service=slow and host == 1))
    return members


LIGHTHOUSE: Final = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=int(sys.argv[2]), join_timeout_ms=60000)
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


def known(path: Path | None) -> dict[str, Row]:
    """Rows that an earlier start has measured, by what they are of."""
    found = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        one = json.loads(line)
        found[one["of"]] = Row(**{**one["row"], "curve": tuple(tuple(point) for point in one["row"]["curve"])})
    return found


def report(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.results is None or not options.results.exists():
        parser.error(f"--report: expected --results and a file of finished runs, got {options.results}")
    runs = runs_of(options.results.read_text())
    print(tables(runs))
    if options.plot is not None:
        try:
            draw(runs, options.learners, options.plot)
        except ValueError as error:
            parser.error(f"--plot: {error}")


def rate(text: str) -> float:
    found = float(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a rate above 0")
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=SYSTEMS, help=f"with commas (default: {SYSTEMS})")
    parser.add_argument("--steps", type=int, default=200, help="of each learner (default: 200)")
    parser.add_argument("--every", type=int, default=50, help="steps between two exchanges, of those that exchange rarely (default: 50)")
    parser.add_argument("--learners", type=int, default=2, help="each on a host of its own (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the batches (default: 0)")
    parser.add_argument("--lr", type=rate, default=LR, help=f"of AdamW, in all systems but DeMo (default: {LR:g})")
    parser.add_argument(
        "--again", type=int, default=0, help="a number: another run of the same, whose seconds count beside the others' (default: 0)"
    )
    parser.add_argument("--mbit", type=float, default=0.0, help="of each learner's link, each way; 0: without a limit (default)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, between the learners (default: 0)")
    parser.add_argument("--curve", type=int, default=0, help="steps between two points of validation; 0: none (default)")
    parser.add_argument("--results", type=Path, help="a file of finished runs, which are not repeated: the benchmark can be run in slices")
    parser.add_argument("--report", action="store_true", help="run nothing; print tables of all that --results has, in Markdown")
    parser.add_argument(
        "--plot", type=Path, help="with --report: draw loss over seconds there, of the runs with --learners and a curve (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if options.work:
        work(options.work, Job(**json.loads(options.job)), options.to)
        return
    if options.report:
        report(options, parser)
        return
    systems = options.systems.split(",")
    unknown = [one for one in systems if one.partition(" ")[0] not in ("ddp", "torchft", "psgc")]
    if any(one.partition(" streaming")[1] for one in systems) and options.every < 2 * FRAGMENTS:
        parser.error(
            f"--every {options.every}: expected at least {2 * FRAGMENTS} for streaming, whose {FRAGMENTS} fragments travel for a step or more"
        )
    if unknown or not 1 <= options.every <= options.steps:
        parser.error(
            f"{', '.join(unknown) or options.every}: expected systems ddp, torchft, 'psgc CODEC' and those of --help, and every from 1 to --steps"
        )
    if options.learners < 2:
        parser.error(f"--learners {options.learners}: expected at least 2")
    if any(one.startswith("torchft") for one in systems) and importlib.util.find_spec("torchft") is None:
        print("far_apart: torchft is not installed, and left out", file=sys.stderr)
        systems = [one for one in systems if not one.startswith("torchft")]
    job = Job(**{field.name: getattr(options, field.name) for field in fields(Job)})
    done, rows = known(options.results), []
    try:
        for system in systems:
            of = json.dumps([system, job.named(), machine()])
            if of not in done:
                done[of] = measure(system, job)
                if options.results is not None:
                    with options.results.open("a") as file:
                        file.write(json.dumps({"of": of, "row": asdict(done[of])}) + "\n")
            rows.append(done[of])
    except TestbedError as error:
        sys.exit(f"far_apart: {error}")
    if options.json:
        print(json.dumps({"hardware": machine(), **asdict(job), "rows": [asdict(row) for row in rows]}))
    else:
        links = f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms" if options.mbit else "links without a limit"
        tell(rows, f"{options.learners} learners, every {options.every}, {links}")


if __name__ == "__main__":
    main()
