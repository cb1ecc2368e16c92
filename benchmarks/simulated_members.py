"""Hundreds of simulated members in one process, for benchmarks of a real scheduler and real servers over real sockets. ``members.py`` and ``ghosts.py`` use it.

A member has a worker's real conversation with the scheduler (``worker/coordinator.py``); what it does with servers is its script's. Members leave out work
that needs a machine for each (reading a layout, encoding, decoding). The scheduler's process is ``python simulated_members.py scheduler``: the real loop,
which counts its messages.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from psgc.config import Config
from psgc.layout import Declaration, Layout
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.server_link import ServerLink
from psgc.transport.watch import Watch
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import Topology
from psgc.wire.reports import Report
from psgc.worker.coordinator import Coordinator
from psgc.worker.membership import Membership

PATIENCE_S = 300.0
TICK_S = 0.25


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

    def say(self, kind: Kind, body: bytes = b"", **fields: int) -> None:
        """Send the scheduler a message as it is."""
        self._line.send(kind, body, **fields)

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

    TALK = Talk

    def __init__(self, job: Job, node: int) -> None:
        self.job = job
        self.heard = Heard()
        self.topology: Topology | None = None
        self.layout_at = 0.0
        self.talk = self.TALK(job.context, replace(job.config, node=node), Membership(reporter=lambda: Report(1, 1)), self)

    def joined(self, topology: Topology) -> None:
        self.topology = topology

    def laid_out(self, layout: Layout) -> None:
        raise AssertionError("layouts are read by Talk")

    def failed(self, text: str) -> None:
        raise Failed(text)


class Peer:
    """What a script has its member do with a server over one connection."""

    link: ServerLink

    def serve(self) -> None:
        """Take in what has come."""
        raise NotImplementedError

    def look(self) -> None:
        """See whether the connection has come up, or is lost."""
        raise NotImplementedError


def peer_of(link: Link) -> Peer:
    return link.owner.peer  # type: ignore[no-any-return]


class Job:
    """Scheduler, servers and simulated workers; ``with`` it, and nothing is left behind. real: workers that the script starts itself, on the first nodes."""

    def __init__(self, ranks: int, servers: int, real: int = 0, env: Mapping[str, str] | None = None) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.env = {
            "DMLC_NUM_WORKER": str(ranks), "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
            "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_JOB": str(secrets.randbits(62) | 1), "PSGC_TOKEN": secrets.token_hex(8),
            "PSGC_TRANSPORT": "tcp", **(env or {}),
        }  # fmt: skip
        self.config = Config.from_env(self.env)
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8 * ranks + 1000)
        self.processes: list[subprocess.Popen[str]] = []  # the scheduler, servers, and what the script starts
        self.layouts: list[Layout] = []
        self.links = LinkSet()
        self.peers: list[Peer] = []
        self._watch = Watch()
        self._next_tick = time.monotonic()
        self._servers, self._nodes = servers, range(real, ranks)
        self.workers: list[Worker] = []

    @property
    def scheduler(self) -> subprocess.Popen[str]:
        return self.processes[0]

    @property
    def servers(self) -> list[subprocess.Popen[str]]:
        return self.processes[1 : 1 + self._servers]

    def __enter__(self) -> Job:
        self.start("scheduler", [sys.executable, __file__, "scheduler"])
        for index in range(self._servers):
            self.start("server", [sys.executable, "-m", "psgc.launch.job.role", "server"], DMLC_SERVER_ID=str(index))
        self.workers = [self.member(node) for node in self._nodes]
        return self

    def member(self, node: int) -> Worker:
        """The simulated worker of a node."""
        return Worker(self, node)

    def start(self, role: str, command: Sequence[str], **extra: str) -> subprocess.Popen[str]:
        """Start a process of the job, which ends with it."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "PSGC_"))}
        env.update(self.env, DMLC_ROLE=role, **extra)
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for worker in self.workers:
            worker.talk.close()
        self.context.destroy(0)

    def until(self, done: Callable[[], Any], what: str) -> float:
        """Carry the conversations on until ``done()``; how long that took. Raises Failed."""
        begin = time.monotonic()
        while not done():
            self.turn()
            if time.monotonic() - begin > PATIENCE_S:
                raise Failed(f"gave up after {PATIENCE_S:.0f} s of waiting for {what}")
        return time.monotonic() - begin

    def pause_s(self) -> float:
        """How long a turn may sleep."""
        return TICK_S / 5

    def turn(self) -> None:
        self.links.flush()
        things = [(self.links.fileno(), zmq.POLLIN), *(thing for worker in self.workers for thing in worker.talk.pollables())]
        ready = self._watch.wait(things, 0.0 if self.links.pending else self.pause_s())
        for worker in self.workers:
            if not ready.isdisjoint({socket for socket, _ in worker.talk.pollables()}):
                worker.talk.receive(ready)
        for connection in self.links.ready():
            peer_of(connection).serve()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            for worker in self.workers:
                worker.talk.tick(now)
            for peer in self.peers:
                if not peer.link.up:
                    peer.look()

    def join(self) -> float:
        """Register the simulated workers, and wait until everyone is there."""
        for worker in self.workers:
            worker.talk.register()
        return self.until(lambda: all(w.topology is not None for w in self.workers), "the job to be complete")

    def for_seconds(self, seconds: float) -> None:
        """Let heartbeats flow."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "nothing")

    def settle(self, seconds: float) -> None:
        """Let heartbeats flow, then set the clocks."""
        self.for_seconds(seconds)
        for worker in self.workers:
            worker.heard.reset()

    def leave(self) -> dict[str, Any]:
        """What the scheduler has recorded."""
        for worker in self.workers:
            worker.talk.leave()
        self.until(lambda: self.scheduler.poll() is not None, "the scheduler to end")
        said = self.scheduler.communicate()[0]
        if not said.strip():
            raise Failed("the scheduler ended without a record: its last line says why")
        return json.loads(said.strip().splitlines()[-1])


def scheduler() -> int:
    """The real scheduler, and a record: when it handled each server's heartbeats, and its messages and its processor time until everyone was there,
    until all had the first layout, and at the end."""
    from psgc.scheduler import loop
    from psgc.scheduler.actions import Action, Send
    from psgc.scheduler.membership import Membership

    heard: dict[bytes, Heard] = {}
    count = {"declarations_read": 0, "received": 0, "sent": 0, "sent_bytes": 0}
    marks: dict[str, dict[str, float]] = {}
    began = 0.0

    def mark(name: str) -> None:
        marks.setdefault(name, {**count, "cpu_s": time.process_time(), "since_first_s": time.monotonic() - began})

    class Recorded(Membership):
        def receive(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Action]:
            nonlocal began
            if not count["received"]:
                began = time.monotonic()
                mark("first")
            count["received"] += 1
            count["declarations_read"] += header.kind == Kind.DECLARATION
            member = self.roster._names.get(peer)
            if header.kind == Kind.HEARTBEAT and member is not None and member.register.role == "server":
                heard.setdefault(peer, Heard()).note()
            actions = super().receive(peer, header, body, now)
            sends = [action for action in actions if isinstance(action, Send)]
            count["sent"] += len(sends)
            count["sent_bytes"] += sum(len(action.body) for action in sends)
            if any(action.header.kind == Kind.TOPOLOGY for action in sends):
                mark("admitted")
            if any(action.header.kind == Kind.LAYOUT for action in sends):
                mark("laid_out")
            return actions

    loop.Membership = Recorded  # type: ignore[misc]
    status = loop.serve(Config.from_env(role="scheduler"))
    mark("end")
    longest = max((h.longest_s for h in heard.values()), default=None)
    print(json.dumps({"declarations_read": count["declarations_read"], "server_s": longest, "scheduler": marks}))
    return status


if __name__ == "__main__":
    sys.exit(scheduler())
