"""Which rank each of Ray's workers has, and the settings of each process. Pure.

Ranks are numbered node by node, as everywhere; nodes in the order of their first worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psgc.launch.job import ranks


@dataclass(frozen=True, slots=True)
class Found:
    """Where one worker was placed. node: Ray's id of the node. gpus: as Ray has given them to it, as CUDA_VISIBLE_DEVICES names them."""

    node: str
    host: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's. worker: its index among those that were found. env: its settings."""

    worker: int
    env: Mapping[str, str]


def seats(found: Sequence[Found], shared: Mapping[str, str]) -> list[Seat]:
    """All ranks, in order. shared: settings of all processes of the job."""
    nodes: dict[str, list[int]] = {}
    for worker, place in enumerate(found):
        nodes.setdefault(place.node, []).append(worker)
    sizes = [len(members) for members in nodes.values()]
    uneven = {"PSGC_NODE_SIZES": ",".join(map(str, sizes))} if len(set(sizes)) > 1 else {}
    seated = []
    for node, members in enumerate(nodes.values()):
        gpus = [gpu for worker in members for gpu in found[worker].gpus]
        devices = (
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        )  # all of the node's, so that a script finds its own by its local rank
        for local_rank, worker in enumerate(members):
            own = {
                "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(node), "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(len(members)),
            }  # fmt: skip
            env = {**shared, "DMLC_NUM_WORKER": str(len(nodes)), **uneven, **devices, **ranks.place(sizes, node, local_rank), **own}
            seated.append(Seat(worker, env))
    return seated


def lacking(needed: Mapping[str, float], available: Mapping[str, float]) -> str:
    """What is asked for and not free in the whole cluster, for an error; "" if it is the nodes' sizes that are wrong."""
    short = {name: amount for name, amount in needed.items() if amount > available.get(name, 0.0)}
    return ", ".join(f"{amount:g} {name} ({available.get(name, 0.0):g} free)" for name, amount in sorted(short.items()))
