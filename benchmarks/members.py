"""Thousands of simulated members against a real scheduler and a real server: are heartbeats in time while everyone speaks at once?

    python benchmarks/members.py storm --ranks 300 --tensors 10000       every rank declares a model at the same moment
    python benchmarks/members.py pushes --ranks 256 --keys 1000          every worker pushes all keys of a step at the same moment

Members live in this one process: workers' real conversations with the scheduler (``worker/coordinator.py``) and, for ``pushes``, their real
connections to the server. They leave out work that needs a machine for each (reading a layout, encoding, decoding). Scheduler and server are
processes as ``psgc run`` starts them. Sums are checked. Prints one JSON line. Heartbeats: ``answers_s`` is the longest time between two
messages of the scheduler to a member (members send one a second), ``server_s`` the longest time between two messages of a server to the scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zmq

from psgc.config import Config
from psgc.diagnostics.machine import machine
from psgc.layout import Declaration, Layout, TensorSpec
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.watch import Watch
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import Topology
from psgc.wire.reports import Report
from psgc.worker.connections.links import connect_server
from psgc.worker.coordinator import Coordinator
from psgc.worker.membership import Membership

PATIENCE_S = 300.0
TICK_S = 0.25
NUMEL = 16  # of a key


class Failed(Exception):
    """Why nothing was measured."""


@dataclass
class Heard:
    """When somebody was heard, and the longest that nothing was, since the clock was set."""

    last: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def note(self) -> None:
        now = time.monotonic()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now

    def reset(self) -> None:
        self.last, self.longest_s = time.monotonic(), 0.0


class Known(Declaration):
    """A declaration whose text and digest are made once, not by each of hundreds of members of one process."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return self._once("to_json")

    def digest(self) -> str:
        return self._once("digest")

    def _once(self, name: str) -> Any:
        made = MADE.setdefault(self.name, {})
        if name not in made:
            made[name] = getattr(super(), name)()
        return made[name]


MADE: dict[str, dict[str, Any]] = {}


class Talk(Coordinator):
    """A worker's conversation with the scheduler. Layouts are read by the first member alone."""

    def __init__(self, context: zmq.Context[Any], config: Config, membership: Membership, owner: Worker) -> None:
        super().__init__(context, config, membership, owner)
        self._own = owner

    def _handle(self, header: Header, body: bytes) -> None:
        self._own.heard.note()
        super()._handle(header, body)

    def _laid_out(self, header: Header, body: bytes) -> None:
        self._own.layout_at = time.monotonic()
        self.requests.laid_out(header.plan)
        if not self._own.job.layouts:
            self._own.job.layouts.append(Layout.from_json(body))


class Worker:
    """One simulated worker: what a Coordinator asks of its owner."""

    def __init__(self, job: Job, node: int) -> None:
        self.job = job
        self.heard = Heard()
        self.topology: Topology | None = None
        self.layout_at = 0.0
        self.talk = Talk(job.context, replace(job.config, node=node), Membership(reporter=lambda: Report(1, 1)), self)

    def joined(self, topology: Topology) -> None:
        self.topology = topology

    def laid_out(self, layout: Layout) -> None:
        raise AssertionError("layouts are read by Talk")

    def failed(self, text: str) -> None:
        raise Failed(text)


class Pusher:
    """A worker's connection to the one server. It pushes as many numbers as a key has, all equal to its rank, and looks at what comes back."""

    def __init__(self, worker: Worker, links: LinkSet) -> None:
        topology = worker.topology
        assert topology is not None
        self.rank, self.size, self.job = topology.rank, topology.size, worker.job.config.job
        self.results, self.lacking, self.first_s, self.last_s = 0, 0, float("inf"), 0.0
        self._epoch = topology.epoch
        self._payload = np.full(NUMEL, self.rank, np.float32).tobytes()
        self._mean = np.full(NUMEL, sum(range(self.size)) / self.size, np.float32).tobytes()
        config = replace(worker.job.config, transport="tcp")
        self.link = connect_server(
            topology.servers[0], links, config, rank=self.rank, epoch=topology.epoch, key=bytes.fromhex(topology.key)
        )

    def push(self, layout: Layout) -> None:
        """All keys of step 1, in the layout's order."""
        codec = layout.scheme(layout.buckets[0]).rounds(NUMEL)[0].pair.push.codec_id
        for _, part in layout.parts():
            self.lacking += 1
            header = Header(
                Kind.PUSH,
                int(Flag.WANT_RESULT),
                self.job,
                self._epoch,
                layout.id,
                part.key,
                1,
                0,
                codec,
                self.rank,
                0,
                1.0,
                len(self._payload),
            )
            self.link.send(header, self._payload)

    def serve(self, began: float) -> None:
        """Take in what has come."""
        for header, payload in self.link.receive():
            if header.kind == Kind.ERROR:
                raise Failed(f"the server says {bytes(payload)!r}")
            if header.kind == Kind.RESULT:
                if payload.tobytes() != self._mean:
                    raise Failed(f"rank {self.rank} got another sum than it must be for key {header.key:#x}")
                now = time.monotonic() - began
                self.first_s, self.last_s = min(self.first_s, now), now
                self.results, self.lacking = self.results + 1, self.lacking - 1
        self.look()

    def look(self) -> None:
        for event in self.link.events():
            if event == "up":
                self.link.send(Header(Kind.HELLO, job=self.job, epoch=self._epoch, sender=self.rank))
            elif self.lacking:
                raise Failed(f"rank {self.rank} lost its connection: {self.link.trouble}")


class Job:
    """Scheduler, servers and simulated workers; ``with`` it, and nothing is left behind."""

    def __init__(self, ranks: int, servers: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.env = {
            "DMLC_NUM_WORKER": str(ranks), "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
            "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_JOB": str(secrets.randbits(62) | 1), "PSGC_TOKEN": secrets.token_hex(8),
            "PSGC_TRANSPORT": "tcp",
        }  # fmt: skip
        self.config = Config.from_env(self.env)
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8 * ranks + 1000)
        self.processes: list[subprocess.Popen[str]] = []
        self.layouts: list[Layout] = []
        self.links = LinkSet()
        self.pushers: list[Pusher] = []
        self.began = 0.0  # the step
        self._watch = Watch()
        self._next_tick = time.monotonic()
        self._servers, self._ranks = servers, ranks

    def __enter__(self) -> Job:
        self._start("scheduler", [sys.executable, __file__, "scheduler"])
        for index in range(self._servers):
            self._start("server", [sys.executable, "-m", "psgc.launch.job.role", "server"], DMLC_SERVER_ID=str(index))
        self.workers = [Worker(self, node) for node in range(self._ranks)]
        for worker in self.workers:
            worker.talk.register()
        return self

    def _start(self, role: str, command: list[str], **extra: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "PSGC_"))}
        env.update(self.env, DMLC_ROLE=role, **extra)
        self.processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for worker in self.workers:
            worker.talk.close()
        self.context.destroy(0)

    def until(self, done: Any, what: str) -> float:
        """Carry the conversations on until ``done()``; how long that took. Raises Failed."""
        begin = time.monotonic()
        while not done():
            self.turn()
            if time.monotonic() - begin > PATIENCE_S:
                raise Failed(f"gave up after {PATIENCE_S:.0f} s of waiting for {what}")
        return time.monotonic() - begin

    def turn(self) -> None:
        self.links.flush()
        things = [(self.links.fileno(), zmq.POLLIN), *(thing for worker in self.workers for thing in worker.talk.pollables())]
        ready = self._watch.wait(things, 0.0 if self.links.pending else TICK_S / 5)
        for worker in self.workers:
            if not ready.isdisjoint({socket for socket, _ in worker.talk.pollables()}):
                worker.talk.receive(ready)
        for connection in self.links.ready():
            pushers_of(connection).serve(self.began)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            for worker in self.workers:
                worker.talk.tick(now)
            for pusher in self.pushers:
                if not pusher.link.up:
                    pusher.look()

    def join(self) -> float:
        return self.until(lambda: all(w.topology is not None for w in self.workers), "the job to be complete")

    def settle(self, seconds: float) -> None:
        """Let heartbeats flow, then set the clocks."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "nothing")
        for worker in self.workers:
            worker.heard.reset()

    def leave(self) -> dict[str, Any]:
        """What the scheduler has recorded."""
        for worker in self.workers:
            worker.talk.leave()
        self.until(lambda: self.processes[0].poll() is not None, "the scheduler to end")
        said = self.processes[0].communicate()[0]
        return json.loads(said.strip().splitlines()[-1])


def scheduler() -> int:
    """The real scheduler, and a record of when it handled each server's heartbeats."""
    from psgc.scheduler import loop
    from psgc.scheduler.membership import Membership

    heard: dict[bytes, Heard] = {}
    whole = 0

    class Recorded(Membership):
        def receive(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Any]:
            nonlocal whole
            whole += header.kind == Kind.DECLARATION
            member = self.roster._names.get(peer)
            if header.kind == Kind.HEARTBEAT and member is not None and member.register.role == "server":
                heard.setdefault(peer, Heard()).note()
            return super().receive(peer, header, body, now)

    loop.Membership = Recorded  # type: ignore[misc]
    status = loop.serve(Config.from_env(role="scheduler"))
    print(json.dumps({"declarations_read": whole, "server_s": max((h.longest_s for h in heard.values()), default=None)}))
    return status


def storm(ranks: int, tensors: int, servers: int) -> dict[str, Any]:
    """Every rank declares the same model at the same moment."""
    specs = tuple(TensorSpec(f"model.layers.{i // 9}.block.{i % 9}.weight", (64, 64 + i % 7), "float32") for i in range(tensors))
    everything = tuple(range(tensors))
    declaration = Known("storm", "plan", specs, "none", True, order=everything[::-1], used=everything)
    declaration.to_json()
    with Job(ranks, servers) as job:
        joined_s = job.join()
        job.settle(3.0)
        begin = time.monotonic()
        for worker in job.workers:
            worker.talk.declare(declaration, lambda _: None)
        declared_s = time.monotonic() - begin
        job.until(lambda: all(w.layout_at for w in job.workers), "the layout")
        layouts = [w.layout_at - begin for w in job.workers]
        job.settle_s = 0.0
        end = time.monotonic() + 2.0
        job.until(lambda: time.monotonic() >= end, "nothing")
        answers_s = max(w.heard.longest_s for w in job.workers)
        recorded = job.leave()
    return {
        "ranks": ranks, "tensors": tensors, "joined_s": joined_s, "declared_s": declared_s, "first_layout_s": min(layouts),
        "last_layout_s": max(layouts), "answers_s": answers_s, **recorded,
    }  # fmt: skip


def pushers_of(connection: Link) -> Pusher:
    return connection.owner.pusher  # type: ignore[no-any-return]


def pushes(ranks: int, keys: int) -> dict[str, Any]:
    """Every worker pushes all keys of a step at the same moment."""
    specs = tuple(TensorSpec(f"t{i}", (NUMEL,), "float32") for i in range(keys))
    everything = tuple(range(keys))
    declaration = Known("pushes", "plan", specs, "none", True, order=everything, used=everything, fuse_bytes=0)
    with Job(ranks, 1) as job:
        joined_s = job.join()
        for worker in job.workers:
            pusher = Pusher(worker, job.links)
            pusher.link.pusher = pusher  # type: ignore[attr-defined]
            job.pushers.append(pusher)
            pusher.look()
            worker.talk.declare(declaration, lambda _: None)
        job.until(lambda: all(p.link.up for p in job.pushers) and all(w.layout_at for w in job.workers), "servers and the layout")
        job.settle(3.0)
        job.began = time.monotonic()
        for pusher in job.pushers:
            pusher.push(job.layouts[0])
            if pusher.rank % 4 == 0:
                job.turn()
        pushed_s = time.monotonic() - job.began
        job.until(lambda: all(p.results == keys for p in job.pushers), "all results")
        end = time.monotonic() + 2.0
        job.until(lambda: time.monotonic() >= end, "nothing")
        answers_s = max(w.heard.longest_s for w in job.workers)
        recorded = job.leave()
    return {
        "ranks": ranks, "keys": keys, "joined_s": joined_s, "pushed_s": pushed_s, "first_result_s": min(p.first_s for p in job.pushers),
        "last_rank_first_result_s": max(p.first_s for p in job.pushers), "last_result_s": max(p.last_s for p in job.pushers),
        "answers_s": answers_s, **recorded,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("storm", "pushes", "scheduler"))
    parser.add_argument("--ranks", type=int, default=300)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=1)
    options = parser.parse_args()
    if options.what == "scheduler":
        sys.exit(scheduler())
    try:
        if options.what == "storm":
            found = storm(options.ranks, options.tensors, options.servers)
        else:
            found = pushes(options.ranks, options.keys)
    except Failed as error:
        print(f"members: {error}", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"machine": machine(()), **{k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}}))


if __name__ == "__main__":
    main()
