"""An exchange of gradients with servers, simulated link by link: how evenly parts lie on machines, and how long every worker waits.

Layouts are made as a job makes them. *Bytes*: what the busiest machine's link has to carry, over the least possible (Jiang et al. 2020, section 4.1).
*Time*: of an exchange in which all gradients are ready at once. A link carries 512 KiB of a message at a time in each direction (of
large models 1/1024 of all bytes), of the connection that is least far with its load; a server sums a contribution at a time.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, NamedTuple

import numba
import numpy as np

from psgc.layout import Declaration, Machines, TensorSpec, build_layout
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.placement import SERVER_THREADS, SUM_S_PER_ELEMENT
from psgc.plan.inputs.architectures import architecture

BYTEPS_PARTITION: Final = 4096000  # bytes: BYTEPS_PARTITION_BYTES
FLOAT: Final = 4
BYTES_PER_S: Final = 1.25e9  # 10 Gbit/s, each way
ONE: Final = 1 << 20  # a whole connection's load
PIECE: Final = 512 << 10  # bytes of a message that a link carries before it turns to another connection, at least:
PIECES: Final = (
    1024  # of all bytes, at most about so many pieces, each of a part: what is missing of an exchange's time is of the order of one piece
)


class Parts(NamedTuple):
    """What is placed, highest priority first: [parts] float32 elements, and the server of each part."""

    numel: np.ndarray
    server: np.ndarray


def machines_of(nodes: int, apart: int) -> Machines:
    """A server and a worker on each of ``nodes`` machines, and a server on each of ``apart`` others, which are numbered first."""
    return Machines(tuple(range(apart + nodes)), (0,) * apart + (1,) * nodes, nodes)


def declared(model: str) -> Declaration:
    """A model's gradients, uncompressed, in the order in which backward makes them."""
    weights = reversed(architecture(model).weights)
    tensors = tuple(TensorSpec(weight.name, weight.shape, "float32") for weight in weights)
    return Declaration(model, "plan", tensors, "none", True, order=tuple(range(len(tensors))))


def placed_by_psgc(declaration: Declaration, machines: Machines) -> Parts:
    """As a job's scheduler does."""
    layout = build_layout(
        declaration, layout_id=1, servers=len(machines.servers), workers=sum(machines.workers), machines=machines
    )  # fmt: skip
    parts = [part for _, part in layout.parts()]
    return Parts(np.array([part.numel for part in parts]), np.array([part.server for part in parts]))


def placed_by_byteps(declaration: Declaration, machines: Machines, function: str) -> Parts:
    """As BytePS does: tensors are not fused, cut into partitions, and numbered in the order of their names."""
    number = {tensor.name: index for index, tensor in enumerate(sorted(declaration.tensors, key=lambda tensor: tensor.name))}
    hashed, most = HashPlacement(function), BYTEPS_PARTITION // FLOAT
    sizes, servers = [], []
    for tensor in declaration.tensors:
        for part, start in enumerate(range(0, tensor.numel, most)):
            sizes.append(min(most, tensor.numel - start))
            servers.append(hashed.server(number[tensor.name], part, machines))
    return Parts(np.array(sizes), np.array(servers))


def spread_ideally(like: Parts, machines: Machines) -> Parts:
    """Of the same bytes, parts that are on average as large as the largest, and of which every server has its best share at every moment. Elements
    need not be whole."""
    shares, _ = machines.ideal()
    used = np.flatnonzero(shares > 1e-9)
    total = float(like.numel.sum())
    rows = max(1, round(total / (len(used) * float(like.numel.max()))))
    return Parts(np.tile(shares[used] * total / rows, rows), np.tile(used, rows))


def bytes_over_optimum(parts: Parts, machines: Machines) -> float:
    """What the busiest machine's link carries, over the least that it could be."""
    on_machine = np.bincount(machines.of_server[parts.server], parts.numel, len(machines.workers))
    total = float(parts.numel.sum())
    return float((machines.fixed * total + machines.own * on_machine).max()) / (machines.ideal()[1] * total)


def piece_bytes(total: float) -> float:
    """Of an exchange of so many bytes."""
    return max(PIECE, total / PIECES)


def exchange_s(parts: Parts, machines: Machines, bytes_per_s: float = BYTES_PER_S) -> float:
    """Seconds until every worker has every part's sum, all of which are ready at once."""
    workers = np.repeat(np.arange(len(machines.workers)), machines.workers)
    nbytes = parts.numel * FLOAT
    pieces = np.maximum(1, np.ceil(nbytes / piece_bytes(float(nbytes.sum())))).astype(np.int64)
    place, step = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.int64)
    for server in set(parts.server.tolist()):
        its = np.flatnonzero(parts.server == server)
        share = ONE * nbytes[its] / nbytes[its].sum()
        place[its], step[its] = np.cumsum(share) - share, share / pieces[its]
    order = np.lexsort((parts.server, place))
    return float(
        _exchange(
            parts.server[order], pieces[order], place[order], step[order], (nbytes / pieces / bytes_per_s)[order],
            (parts.numel * SUM_S_PER_ELEMENT / SERVER_THREADS)[order], machines.of_server, workers, len(machines.workers),
        )
    )  # fmt: skip


# Stages of a contribution: over the sender's link, over the receiver's, into the sum; and of a result: over the two links.
_PUSH_UP, _PUSH_DOWN, _SUM, _PULL_UP, _PULL_DOWN = range(5)


@numba.njit(cache=True)
def _exchange(
    server: Any, pieces: Any, before: Any, step: Any, wire: Any, summing: Any, machine: Any, workers: Any, machines: int
) -> float:
    """Lanes: each machine's link up, each one's link down, each server's processor. A lane takes the task whose connection is least far with what it
    has to carry; a task is (how far, minus its stage, part, worker). before, step: how far a part's connection is when it begins, and for each piece."""
    parts, count, lanes = len(server), len(workers), 2 * machines + len(machine)
    waiting = [[(0, 0, 0, 0)][:0] for _ in range(lanes)]
    busy, summed, arrived = np.zeros(lanes, np.bool_), np.zeros(parts, np.int64), np.zeros((parts, count), np.int64)
    events = [(0.0, (0, 0, 0, 0), 0)][:0]  # when a task is done: time, task, lane
    arrivals, idle = [(0, 0, 0, 0)][:0], [0][:0]
    for part in range(parts):
        for worker in range(count):
            if workers[worker] == machine[server[part]]:
                arrivals.append((before[part], -_SUM, part, worker))
                continue
            for piece in range(pieces[part]):
                arrivals.append((before[part] + piece * step[part], -_PUSH_UP, part, worker))
    now = 0.0
    while True:
        for task in arrivals:
            stage, part, worker = -task[1], task[2], task[3]
            if stage == _SUM:
                lane = 2 * machines + server[part]
            else:
                at = workers[worker] if stage in (_PUSH_UP, _PULL_DOWN) else machine[server[part]]
                lane = at + (machines if stage in (_PUSH_DOWN, _PULL_DOWN) else 0)
            heapq.heappush(waiting[lane], task)
            idle.append(lane)
        arrivals.clear()
        for lane in idle:
            if not busy[lane] and len(waiting[lane]):
                task = heapq.heappop(waiting[lane])
                busy[lane] = True
                heapq.heappush(events, (now + (summing[task[2]] if -task[1] == _SUM else wire[task[2]]), task, lane))
        idle.clear()
        if not len(events):
            return now
        now, task, lane = heapq.heappop(events)
        busy[lane] = False
        idle.append(lane)
        place, stage, part, worker = task[0], -task[1], task[2], task[3]
        if stage in (_PUSH_UP, _PULL_UP):
            arrivals.append((place, -(stage + 1), part, worker))
        elif stage == _PUSH_DOWN:
            arrived[part, worker] += 1
            if arrived[part, worker] == pieces[part]:
                arrivals.append((before[part], -_SUM, part, worker))
        elif stage == _SUM:
            summed[part] += 1
            if summed[part] == count:
                for other in range(count):
                    if workers[other] != machine[server[part]]:
                        for piece in range(pieces[part]):
                            arrivals.append((before[part] + piece * step[part], -_PULL_UP, part, other))
