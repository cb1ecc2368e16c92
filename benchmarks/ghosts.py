"""What a contribution costs a server, and what a start costs the scheduler, from 8 workers to 1,024: two real workers, and ghosts in place of all others.

    python benchmarks/ghosts.py [--workers 8,64,256,1024] [--codec none|bf16|int8|onebit] [--tensors 10000] [--keys 16] [--part-kib 64] [--servers 1]
                                [--contributions 40000] [--json]

First two real workers run a job of their own, in which all that they send is recorded: declarations, barriers, and each step's payloads with the moments at
which they left. Then, for each number of workers, two real workers and one process with the other members run a job. A *ghost* repeats a record over
connections of its own, by the real protocol: it declares, waits for the layout, proves itself to each server, keeps to the servers' windows, pushes each
payload no sooner than the recorded one after the step's beginning, and begins a step when it has all results of the last. Scheduler and servers are
processes as ``psgc run`` starts them, and know nothing of ghosts.

Sums are checked, in every element of every step, by the real workers and by the ghosts: gradients are drawn so that the codec carries them exactly.

Columns: *server us* is the servers' processor time for a contribution (receiving, adding, answering with the result), from the end of the first step
to that of the last; *MiB* the servers' memory in use at its highest, *KiB each* its growth since before the layout, for each contribution of a step;
*start s* the time from the ghosts' registration to the last TOPOLOGY, *layout s* from the declaration to the last layout; *sched ms* and *messages* the
scheduler's processor time, and the messages that it received and sent, from the first registration to the layout, for each member; *step s* the wall
time of a step, most of it the ghosts' own work.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_members import Failed, Job, Peer, Talk, Worker

from psgc.codecs import BucketContext, parse_scheme
from psgc.config import Config
from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table
from psgc.layout import Declaration, TensorSpec
from psgc.transport.server_link import ServerLink, connect_server
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import ErrorCode

REAL: Final = 2
RECORDED_STEPS: Final = 6
CYCLE: Final = 4  # of gradients: step s has those of step s - CYCLE
BACKWARD_S: Final = 0.02  # from a real worker's first gradient to its last
CODECS: Final = ("none", "bf16", "int8", "onebit")


# the gradients, and the sums that must come of them


def gradient(codec: str, seed: int, rank: int, step: int, numel: int) -> np.ndarray:
    """A rank's gradient of a bucket, [numel] float32, which the codec carries exactly. Uncompressed, even and odd ranks differ; else all ranks have the same
    signs, so that their mean is carried exactly, too."""
    turn = step % CYCLE
    if codec == "none":
        return np.random.default_rng([seed, turn, rank % REAL]).integers(-8, 8, numel).astype(np.float32)
    return np.random.default_rng([seed, turn]).integers(0, 2, numel).astype(np.float32) * 2 - 1


def mean(codec: str, seed: int, ranks: int, step: int, numel: int) -> np.ndarray:
    """What every rank must get, [numel] float32."""
    even, odd = (gradient(codec, seed, rank, step, numel) for rank in range(REAL))
    return (even * ((ranks + 1) // 2) + odd * (ranks // 2)) / np.float32(ranks)


def is_right(codec: str, got: np.ndarray, wanted: np.ndarray) -> bool:
    """Lossy codecs round in the last places; one contribution more or less of 1,024 is ten times as much."""
    return np.array_equal(got, wanted) if codec == "none" else bool(np.allclose(got, wanted, rtol=0, atol=1e-4))


def declaration_of(codec: str, tensors: int, keys: int, part_kib: int) -> Declaration:
    """``tensors`` tensors of equal size, fused into about ``keys`` buckets of ``part_kib`` KiB, with a key each."""
    numel = max(1, keys * part_kib * 256 // tensors)
    specs = tuple(TensorSpec(f"model.layers.{i // 9}.block.{i % 9}.weight", (numel,), "float32") for i in range(tensors))
    everything = tuple(range(tensors))
    return Declaration(
        "ghosts", "plan", specs, codec, True, order=everything, used=everything, fuse_bytes=part_kib << 10, part_bytes=part_kib << 10,
        min_compress_bytes=0,
    )  # fmt: skip


# the record


class Push(NamedTuple):
    """One contribution. at: seconds after its step began."""

    at: float
    server: int
    header: Header
    payload: bytes


@dataclass
class Record:
    """All that one real worker sent. opening: declarations and barriers, in order, until its first push; steps: its contributions by step."""

    opening: list[tuple[Kind, bytes, dict[str, int]]] = field(default_factory=list)
    steps: dict[int, list[Push]] = field(default_factory=lambda: defaultdict(list))

    def of_step(self, step: int) -> list[Push]:
        """The contributions of any step: after those recorded, the last CYCLE come again and again."""
        last = max(self.steps)
        return self.steps[step if step <= last else last - CYCLE + 1 + (step - last - 1) % CYCLE]

    def save(self, path: Path) -> None:
        payloads = [push.payload for of_step in self.steps.values() for push in of_step]
        words = {
            "opening": [(int(kind), body.hex(), fields) for kind, body, fields in self.opening],
            "steps": [(step, [(p.at, p.server, p.header) for p in of_step]) for step, of_step in self.steps.items()],
            "sizes": [len(payload) for payload in payloads],
        }
        path.with_suffix(".payloads").write_bytes(b"".join(payloads))
        path.write_text(json.dumps(words))

    @classmethod
    def load(cls, path: Path) -> Record:
        words, payloads = json.loads(path.read_text()), path.with_suffix(".payloads").read_bytes()
        record, lo, sizes = cls(), 0, iter(words["sizes"])
        record.opening = [(Kind(kind), bytes.fromhex(body), fields) for kind, body, fields in words["opening"]]
        for step, pushes in words["steps"]:
            for at, server, header in pushes:
                size = next(sizes)
                record.steps[step].append(Push(at, server, Header(*header), payloads[lo : lo + size]))
                lo += size
        return record


class Recorder:
    """Notes what this process's worker sends. It stands between the worker and its two kinds of connections."""

    def __init__(self) -> None:
        from psgc.worker import coordinator

        self.record = Record()
        self.began = 0.0  # the step under way
        line, say, send = coordinator._Line, coordinator._Line.send, ServerLink.send

        def said(to: Any, kind: Kind, body: bytes = b"", **fields: int) -> None:
            self._note(kind, body, fields)
            say(to, kind, body, **fields)

        def sent(to: ServerLink, header: Header, body: bytes = b"", place: Any = None) -> None:
            if header.kind in (Kind.PUSH, Kind.SKIP):
                payload = body if place is None else place.bytes[: header.payload_bytes]
                self.record.steps[header.step].append(Push(time.monotonic() - self.began, to.server, header, bytes(payload)))
            send(to, header, body, place)

        line.send, ServerLink.send = said, sent  # type: ignore[method-assign]

    def _note(self, kind: Kind, body: bytes, fields: dict[str, int]) -> None:
        if kind in (Kind.DECLARE, Kind.BARRIER) and not self.record.steps:
            self.record.opening.append((kind, body, fields))
        elif kind not in (Kind.REGISTER, Kind.HEARTBEAT, Kind.REPORT, Kind.DECLARATION, Kind.BYE):
            raise Failed(f"the real worker sent the scheduler {kind.name}, which a ghost cannot repeat")


# a real worker


class Bucket:
    """Where a bucket's elements come from and go to."""

    waits = False

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def load(self) -> np.ndarray:
        return self.array

    def store(self, skipped: bool) -> None:
        """The mean is where it is wanted."""


def real_worker(options: argparse.Namespace) -> None:
    """Train without a model: submit each bucket's gradient in turn, wait for the means, and check them."""
    recorder = Recorder() if options.record else None
    from psgc.worker.cluster import ClusterSession

    print("ready", flush=True)
    session = ClusterSession.open(Config.from_env())
    layout = session.declare(declaration_of(options.codec, options.tensors, options.keys, options.part_kib))
    for step in range(1, options.steps + 1):
        if recorder is not None:
            recorder.began = time.monotonic()
        arrays = [gradient(options.codec, bucket.index, session.rank, step, bucket.numel) for bucket in layout.buckets]
        tickets = []
        for bucket, array in zip(layout.buckets, arrays, strict=True):
            time.sleep(BACKWARD_S / len(layout.buckets))
            tickets.append(session.submit(layout, bucket.index, Bucket(array)))
        session.wait(tickets)
        for bucket, array in zip(layout.buckets, arrays, strict=True):
            if not is_right(options.codec, array, mean(options.codec, bucket.index, session.size, step, bucket.numel)):
                raise Failed(f"rank {session.rank}: step {step}, bucket {bucket.index}: not the mean of {session.size} ranks")
    session.close()
    if recorder is not None:
        recorder.record.save(Path(options.record))


# ghosts


class GhostTalk(Talk):
    """A ghost's conversation with the scheduler: the recorded one."""

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.DECLARE:
            raise Failed("the scheduler asks a ghost for its whole declaration: the real workers' is not the recorded one")
        super()._handle(header, body)
        if header.kind in (Kind.LAYOUT, Kind.BARRIER):
            self._own.answered()  # type: ignore[attr-defined]


class Connection(Peer):
    """A ghost's connection to one server."""

    def __init__(self, ghost: Ghost, server: int) -> None:
        topology, config = ghost.topology, ghost.job.config
        assert topology is not None
        self.ghost, self.limits, self.held = ghost, dict[int, int](), list[Push]()
        key = bytes.fromhex(topology.key)
        self.link = connect_server(topology.servers[server], ghost.job.links, config, rank=topology.rank, epoch=topology.epoch, key=key)
        self.link.peer = self  # type: ignore[attr-defined]

    def send(self, push: Push) -> None:
        """Push it, or hold it until the server's window admits it."""
        ghost, header = self.ghost, push.header
        part, parts = ghost.job.positions[header.key]
        if header.kind == Kind.PUSH and (header.step - 1) * parts + part >= self.limits.get(header.plan, 0):
            self.held.append(push)
            return
        assert ghost.topology is not None
        self.link.send(header._replace(job=ghost.job.config.job, epoch=ghost.topology.epoch, sender=ghost.topology.rank), push.payload)

    def serve(self) -> None:
        for header, payload in self.link.receive():
            if header.kind == Kind.ERROR:
                raise Failed(f"a server says {bytes(payload)!r} ({ErrorCode(json.loads(bytes(payload)).get('code', 0)).name})")
            if header.kind == Kind.RESULT:
                self.ghost.took(header, payload)
            elif header.kind == Kind.WINDOW:
                self.limits[header.plan] = max(header.step, self.limits.get(header.plan, 0))
                held, self.held = self.held, []
                for push in held:
                    self.send(push)
        self.look()

    def look(self) -> None:
        for event in self.link.events():
            if event == "up":
                topology = self.ghost.topology
                assert topology is not None
                self.link.send(Header(Kind.HELLO, job=self.ghost.job.config.job, epoch=topology.epoch, sender=topology.rank))
            elif self.ghost.lacking:
                raise Failed(f"a ghost lost its connection: {self.link.remedy}")


class Ghost(Worker):
    """One simulated worker that repeats a record."""

    TALK = GhostTalk
    job: GhostJob
    record: Record

    def __init__(self, job: GhostJob, node: int) -> None:
        super().__init__(job, node)
        self.connections: list[Connection] = []
        self.step, self.lacking, self._said = 0, 0, 0

    @property
    def opened(self) -> bool:
        return self._said > len(self.record.opening)

    def open(self) -> None:
        """Everyone is there: connect to the servers, and begin to repeat the record."""
        assert self.topology is not None
        self.record = self.job.records[self.topology.rank % REAL]
        self.connections = [Connection(self, server.index) for server in self.topology.servers]
        self.job.peers.extend(self.connections)
        for connection in self.connections:
            connection.look()

    def answered(self) -> None:
        """The scheduler has answered what this ghost said last (or nothing has been said): say the next."""
        if self._said < len(self.record.opening):
            kind, body, fields = self.record.opening[self._said]
            self.talk.say(kind, body, **fields)
        self._said += 1

    def begin_step(self) -> None:
        self.step += 1
        pushes = self.record.of_step(self.step)
        self.lacking = len(pushes)
        now = time.monotonic()
        for push in pushes:
            self.job.later(now + push.at, self, push._replace(header=push.header._replace(step=self.step)))

    def took(self, header: Header, payload: Any) -> None:
        """A result has come."""
        if header.step != self.step:
            raise Failed(f"a ghost at step {self.step} got a result of step {header.step}")
        self.job.check(header, payload)
        self.lacking -= 1
        if not self.lacking:
            self.job.finished(self)


class GhostJob(Job):
    """A job of two real workers and ghosts. options: of the command."""

    def __init__(self, ranks: int, options: argparse.Namespace, records: Sequence[Record]) -> None:
        super().__init__(ranks, options.servers, REAL, {"PSGC_SEED": "1"})
        self.ranks, self.options, self.records = ranks, options, records
        self.steps = options.steps
        self.positions: dict[int, tuple[int, int]] = {}  # by key: its position among its server's parts, and how many those are
        self.may_begin, self.done = 1, 0  # the last step that ghosts may begin; ghosts that have finished it
        self._due: list[tuple[float, int, Ghost, Push]] = []
        self._count = 0
        self._right: dict[tuple[int, int], bytes] = {}  # verified payloads, by key and step
        self._parts: dict[int, Any] = {}

    def member(self, node: int) -> Worker:
        return Ghost(self, node)

    @property
    def ghosts(self) -> list[Ghost]:
        return self.workers  # type: ignore[return-value]

    def later(self, when: float, ghost: Ghost, push: Push) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, ghost, push))

    def turn(self) -> None:
        super().turn()
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, ghost, push = heapq.heappop(self._due)
            ghost.connections[push.server].send(push)

    def pause_s(self) -> float:
        return max(0.0, min(super().pause_s(), self._due[0][0] - time.monotonic())) if self._due else super().pause_s()

    def finished(self, ghost: Ghost) -> None:
        """A ghost has all results of its step. The steps that are measured begin when all have ended the first."""
        self.done += ghost.step == self.may_begin
        if ghost.step < min(self.may_begin, self.steps):
            ghost.begin_step()

    def read_layout(self) -> None:
        (layout,) = self.layouts
        parts: dict[int, list[Any]] = defaultdict(list)
        for bucket, part in layout.served.parts():
            parts[part.server].append(part)
            self._parts[part.key] = bucket, part
        for on_server in parts.values():
            for place, part in enumerate(sorted(on_server, key=lambda part: part.position)):
                self.positions[part.key] = place, len(on_server)
        if recorded := {push.header.key for push in self.records[0].of_step(1)} ^ set(self.positions):
            raise Failed(f"the layout has other keys than the recorded one: {len(recorded)} are in one of both only")

    def check(self, header: Header, payload: Any) -> None:
        """A result must be the mean of all ranks' gradients."""
        seen = self._right.get((header.key, header.step % CYCLE))
        if seen is not None and bytes(payload) == seen and header.contributors == self.ranks:
            return
        bucket, part = self._parts[header.key]
        codec = self.options.codec
        pull = parse_scheme(codec, BucketContext("float32", self.ranks, True)).rounds(part.numel)[0].pair.pull
        got = np.empty(part.numel, np.float32)
        pull.decode(np.frombuffer(bytes(payload), np.uint8), part.numel, 0, part.numel, got)
        wanted = mean(codec, bucket.index, self.ranks, header.step, bucket.numel)[part.offset : part.offset + part.numel]
        if header.contributors != self.ranks or not is_right(codec, got, wanted):
            raise Failed(f"key {header.key:#x}, step {header.step}: not the mean of {self.ranks} ranks ({header.contributors} contributed)")
        self._right[header.key, header.step % CYCLE] = bytes(payload)

    def start_real(self, record: str = "") -> None:
        """Start the real workers, and wait until they are about to register."""
        started = [self.start("worker", real_command(self.options, self.steps, record), DMLC_WORKER_ID=str(node)) for node in range(REAL)]
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise Failed("a real worker ended before it joined: its last line says why")

    def check_real(self) -> None:
        """The real workers have ended, and their sums were right."""
        for process in self.processes[1 + len(self.servers) :]:
            if status := process.wait():
                raise Failed(f"a real worker ended with status {status}: its last line says why")


def real_command(options: argparse.Namespace, steps: int, record: str = "") -> list[str]:
    given = ["--codec", options.codec, "--tensors", options.tensors, "--keys", options.keys, "--part-kib", options.part_kib]
    return [sys.executable, __file__, "real", *map(str, given), "--steps", str(steps), "--record", record]


def recorded(options: argparse.Namespace, folder: Path) -> list[Record]:
    """The records of two real workers in a job of their own."""
    with Job(REAL, options.servers, REAL, {"PSGC_SEED": "1"}) as job:
        paths = [folder / f"{node}.json" for node in range(REAL)]
        workers = [
            job.start("worker", real_command(options, RECORDED_STEPS, str(path)), DMLC_WORKER_ID=str(node))
            for node, path in enumerate(paths)
        ]
        for worker in workers:
            if worker.wait():
                raise Failed("nothing was recorded: the real worker's last line says why")
    by_rank = sorted((Record.load(path) for path in paths), key=lambda record: record.of_step(1)[0].header.sender)
    if any(len(record.of_step(step)) != len(by_rank[0].of_step(1)) for record in by_rank for step in range(1, RECORDED_STEPS + 1)):
        raise Failed("the recorded steps have different numbers of contributions: a message was sent twice")
    return by_rank


# what is measured


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_kib(pid: int, what: str) -> int:
    """VmRSS or VmHWM."""
    return next(int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what))


def measure(ranks: int, options: argparse.Namespace, records: Sequence[Record]) -> dict[str, Any]:
    """One job of ``ranks`` workers."""
    keys = len(records[0].of_step(1))
    options.steps = 1 + max(2, min(400, options.contributions // (ranks * keys)))
    with GhostJob(ranks, options, records) as job:
        job.start_real()
        start_s = job.join()
        for ghost in job.ghosts:
            ghost.open()
        job.until(lambda: all(peer.link.up for peer in job.peers), "the servers")
        before_kib = [memory_kib(server.pid, "VmRSS") for server in job.servers]
        began = time.monotonic()
        for ghost in job.ghosts:
            ghost.answered()
        job.until(lambda: all(ghost.opened for ghost in job.ghosts), "the layout")
        layout_s = max(ghost.layout_at for ghost in job.ghosts) - began
        job.read_layout()
        for ghost in job.ghosts:
            ghost.begin_step()
        job.until(lambda: job.done == len(job.ghosts), "the first step")
        used = [cpu_s(server.pid) for server in job.servers]
        began = time.monotonic()
        job.may_begin, job.done = job.steps, 0
        for ghost in job.ghosts:
            ghost.begin_step()
        job.until(lambda: job.done == len(job.ghosts), "the last step")
        step_s = (time.monotonic() - began) / (job.steps - 1)
        used = [cpu_s(server.pid) - before for server, before in zip(job.servers, used, strict=True)]
        most_kib = [memory_kib(server.pid, "VmHWM") for server in job.servers]
        said = job.leave()
        job.check_real()
    first, laid_out = said["scheduler"]["first"], said["scheduler"]["laid_out"]
    return {
        "workers": ranks, "keys": keys, "steps": job.steps, "payload_bytes": len(records[0].of_step(1)[0].payload),
        "server_us": 1e6 * sum(used) / ((job.steps - 1) * ranks * keys),
        "server_mib": sum(most_kib) / 1024, "contribution_kib": (sum(most_kib) - sum(before_kib)) / (ranks * keys),
        "start_s": start_s, "layout_s": layout_s, "step_s": step_s,
        "scheduler_ms": 1e3 * (laid_out["cpu_s"] - first["cpu_s"]) / ranks,
        "messages": (laid_out["received"] + laid_out["sent"]) / ranks, "declarations_read": said["declarations_read"],
    }  # fmt: skip


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{each['workers']:,}", f"{each['server_us']:.1f}", f"{each['server_us'] / found[0]['server_us']:.2f}",
            f"{each['server_mib']:.0f}", f"{each['contribution_kib']:.1f}", f"{each['start_s']:.2f}", f"{each['layout_s']:.2f}",
            f"{each['scheduler_ms']:.2f}", f"{each['messages']:.1f}", f"{each['step_s']:.2f}",
        ]
        for each in found
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("real",), help=argparse.SUPPRESS)
    parser.add_argument("--workers", default="8,64,256,1024")
    parser.add_argument("--codec", choices=CODECS, default="none")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=16)
    parser.add_argument("--part-kib", type=int, default=64)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument(
        "--contributions", type=int, default=40_000, help="measured at each size, at least; two steps of all ranks, if those are more"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--record", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.what == "real":
            real_worker(options)
            return
        sizes = [int(size) for size in options.workers.split(",")]
        if min(sizes) <= REAL:
            raise Failed(f"--workers {options.workers}: each number must be more than the {REAL} real workers")
        with tempfile.TemporaryDirectory() as folder:
            records = recorded(options, Path(folder))
            found = [measure(size, options, records) for size in sizes]
    except Failed as error:
        print(f"ghosts: {error}", file=sys.stderr)
        sys.exit(1)
    if options.json:
        print(json.dumps({"machine": machine(()), "codec": options.codec, "sizes": found}))
        return
    print(
        f"{machine(())}; {options.codec}, {options.tensors:,} tensors in {found[0]['keys']} keys, payloads of {found[0]['payload_bytes']:,} bytes"
    )
    names = ["workers", "server us", "over the first", "MiB", "KiB each", "start s", "layout s", "sched ms", "messages", "step s"]
    print_table(names, rows(found))


if __name__ == "__main__":
    main()
