"""Thousands of simulated members against a real scheduler and a real server: are heartbeats in time while everyone speaks at once?

    python benchmarks/members.py storm --ranks 300 --tensors 10000       every rank declares a model at the same moment
    python benchmarks/members.py pushes --ranks 256 --keys 1000          every worker pushes all keys of a step at the same moment

Members are those of ``simulated_members.py``, for ``pushes`` with their real connections to the server. Scheduler and server are
processes as ``psgc run`` starts them. Sums are checked. Prints one JSON line. Heartbeats: ``answers_s`` is the longest time between two
messages of the scheduler to a member (members send one a second), ``server_s`` the longest time between two messages of a server to the scheduler.
What a contribution costs, and how that grows with the members, is ``ghosts.py``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_members import Failed, Job, Known, Peer, Worker

from psgc.diagnostics.machine import machine
from psgc.layout import Layout, TensorSpec
from psgc.transport.link_set import LinkSet
from psgc.transport.server_link import connect_server
from psgc.wire.frames import Flag, Header, Kind

NUMEL = 16  # of a key


class Pusher(Peer):
    """A worker's connection to the one server. It pushes as many numbers as a key has, all equal to its rank, and looks at what comes back."""

    def __init__(self, worker: Worker, links: LinkSet) -> None:
        topology = worker.topology
        assert topology is not None
        self.rank, self.size, self.job = topology.rank, topology.size, worker.job.config.job
        self.results, self.lacking, self.first_s, self.last_s, self.began = 0, 0, float("inf"), 0.0, 0.0
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

    def serve(self) -> None:
        for header, payload in self.link.receive():
            if header.kind == Kind.ERROR:
                raise Failed(f"the server says {bytes(payload)!r}")
            if header.kind == Kind.RESULT:
                if payload.tobytes() != self._mean:
                    raise Failed(f"rank {self.rank} got another sum than it must be for key {header.key:#x}")
                now = time.monotonic() - self.began
                self.first_s, self.last_s = min(self.first_s, now), now
                self.results, self.lacking = self.results + 1, self.lacking - 1
        self.look()

    def look(self) -> None:
        for event in self.link.events():
            if event == "up":
                self.link.send(Header(Kind.HELLO, job=self.job, epoch=self._epoch, sender=self.rank))
            elif self.lacking:
                raise Failed(f"rank {self.rank} lost its connection: {self.link.trouble}")


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
        job.for_seconds(2.0)
        answers_s = max(w.heard.longest_s for w in job.workers)
        recorded = job.leave()
    return {
        "ranks": ranks, "tensors": tensors, "joined_s": joined_s, "declared_s": declared_s, "first_layout_s": min(layouts),
        "last_layout_s": max(layouts), "answers_s": answers_s, **recorded,
    }  # fmt: skip


def pushes(ranks: int, keys: int) -> dict[str, Any]:
    """Every worker pushes all keys of a step at the same moment."""
    specs = tuple(TensorSpec(f"t{i}", (NUMEL,), "float32") for i in range(keys))
    everything = tuple(range(keys))
    declaration = Known("pushes", "plan", specs, "none", True, order=everything, used=everything, fuse_bytes=0)
    with Job(ranks, 1) as job:
        joined_s = job.join()
        pushers = []
        for worker in job.workers:
            pusher = Pusher(worker, job.links)
            pusher.link.peer = pusher  # type: ignore[attr-defined]
            pushers.append(pusher)
            job.peers.append(pusher)
            pusher.look()
            worker.talk.declare(declaration, lambda _: None)
        job.until(lambda: all(p.link.up for p in pushers) and all(w.layout_at for w in job.workers), "servers and the layout")
        job.settle(3.0)
        began = time.monotonic()
        for pusher in pushers:
            pusher.began = began
            pusher.push(job.layouts[0])
            if pusher.rank % 4 == 0:
                job.turn()
        pushed_s = time.monotonic() - began
        job.until(lambda: all(p.results == keys for p in pushers), "all results")
        job.for_seconds(2.0)
        answers_s = max(w.heard.longest_s for w in job.workers)
        recorded = job.leave()
    return {
        "ranks": ranks, "keys": keys, "joined_s": joined_s, "pushed_s": pushed_s, "first_result_s": min(p.first_s for p in pushers),
        "last_rank_first_result_s": max(p.first_s for p in pushers), "last_result_s": max(p.last_s for p in pushers),
        "answers_s": answers_s, **recorded,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("storm", "pushes"))
    parser.add_argument("--ranks", type=int, default=300)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=1)
    options = parser.parse_args()
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
