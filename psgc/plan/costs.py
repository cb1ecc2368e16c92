"""What an option costs: its actions as tasks on resources, each a line in the bucket's size, or a codec's curve.

Owns what each action moves, counts and computes; knows nothing of time's order (``timeline``) or of choosing (``search``). A bucket of n
float32 elements is followed through the option: how many elements a rank holds (``share`` of n), in how many payloads (``pieces``) if it is
encoded, and how many of a node's ranks work on it (``active``: all, or one root). With p ranks in a group, m bytes held by each, alpha the
latency of a message and beta the microseconds a byte:

| routine                      | bytes through a rank's link, one way | messages in a row |
|------------------------------|--------------------------------------|-------------------|
| all_reduce (ring)            | 2 m (p - 1) / p                      | 2 (p - 1)         |
| reduce_scatter, all_gather of shards | m (p - 1) / p                | p - 1             |
| reduce, broadcast (pipelined chain)  | m                            | p - 1             |
| all_gather.c of whole payloads       | m (p - 1): p pieces come     | p - 1             |
| all_to_all.c                 | m (p - 1) / p                        | p - 1             |
| gather.c                     | m (p - 1): p pieces come to the root | p - 1             |
| push, pull                   | m, or the servers' share of all ranks' if that is more | 1   |

Between nodes the link is the node's: what its active ranks send together goes through it. A flat group's ring passes each node's link
once a way, so it carries what one rank's link would. Of a flat all-to-all each of a node's ranks, and of a flat gather the root, sends or takes
through it what does not stay within the node.
Decoding costs each piece: an all-gather's p payloads are p times as many elements as one's.
Sources: Thakur et al. 2005 for collectives; Wang et al. 2023 (Espresso), table 3, for what follows what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.cluster import Cluster
from psgc.plan.options import Option
from psgc.plan.profile import CostCurve

GPU, CPU, INTRA, SEND, RECEIVE, SERVER = range(6)
RESOURCES: Final = ("gpu", "cpu", "intra", "inter-send", "inter-receive", "server")
BOTH_WAYS: Final = -1  # a collective between nodes: holds SEND and RECEIVE together


class Task(NamedTuple):
    """One action on one resource: ``fixed_us + per_element_us * n``, or a codec's curve at ``elements`` of n, ``times`` over.

    codec: "" for none, else "gpu.encode", "cpu.decode", ..."""

    action: str
    resource: int
    fixed_us: float
    per_element_us: float
    codec: str = ""
    share: float = 1.0
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """What a plan needs of a codec: bytes an element, and its curves by device."""

    name: str
    bytes_per_element: float
    curves: dict[str, CostCurve]

    def device(self, name: str) -> CostCurve:
        curve = self.curves.get(name)
        if curve is None:
            raise UsageError(f"codec {self.name}: the profile has no times for it on {name}; measure them with psgc profile")
        return curve


@dataclass
class Held:
    """What a rank holds on its way. share: of the bucket's elements, in each piece."""

    share: float = 1.0
    pieces: int = 1
    encoded: bool = False
    root_only: bool = False
    split: tuple[str, ...] = ()  # levels whose first step has been taken, innermost last


def tasks(option: Option, cluster: Cluster, bytes_per_element: float) -> tuple[Task, ...]:
    """The option's tasks, in order. bytes_per_element: of payloads."""
    return follow(option, cluster, bytes_per_element)[0]


def follow(option: Option, cluster: Cluster, bytes_per_element: float) -> tuple[tuple[Task, ...], Held]:
    """The option's tasks, and what a rank holds after them."""
    held, made = Held(), []
    for action in option:
        if action.startswith(("comp@", "decomp@")):
            made.append(_codec_task(action, held))
        else:
            made += _communicate(action, cluster, held, bytes_per_element)
    return tuple(made), held


def _codec_task(action: str, held: Held) -> Task:
    verb, _, device = action.partition("@")
    resource = GPU if device == "gpu" else CPU
    if verb == "comp":
        held.encoded = True
        return Task(action, resource, 0.0, 0.0, f"{device}.encode", held.share)
    task = Task(action, resource, 0.0, 0.0, f"{device}.decode", held.share, float(held.pieces))
    held.encoded, held.pieces = False, 1
    return task


def _communicate(action: str, cluster: Cluster, held: Held, bytes_per_element: float) -> list[Task]:
    level, operation = action.split(".")[:2]
    size = held.share * held.pieces * (bytes_per_element if held.encoded else 4.0)  # bytes an element of the bucket
    if operation in ("push", "pull"):
        return [_with_server(action, level, operation, cluster, held, size)]
    ranks = {"flat": cluster.gpus, "intra": cluster.gpus_per_node, "inter": cluster.nodes}[level]
    if ranks == 1:
        return []
    volume, messages = _VOLUMES[operation](ranks, held)
    _advance(operation, level, ranks, held)
    link = cluster.intra if level == "intra" or (level == "flat" and cluster.nodes == 1) else cluster.inter
    per_node = 1.0
    if link is cluster.inter:
        per_node = _ranks_on_the_link(level, operation, cluster, held)
    resource = INTRA if link is cluster.intra else BOTH_WAYS
    return [Task(action, resource, messages * link.latency_us, volume * size * per_node * link.us_per_byte)]


def _ranks_on_the_link(level: str, operation: str, cluster: Cluster, held: Held) -> float:
    """How many ranks' worth of bytes a node's link carries."""
    k = cluster.gpus_per_node
    if level == "inter":
        return 1.0 if held.root_only else float(k)
    if operation in ("all_to_all", "gather"):
        beyond_the_node = (cluster.gpus - k) / (cluster.gpus - 1)
        return k * beyond_the_node if operation == "all_to_all" else beyond_the_node
    return 1.0


def _with_server(action: str, level: str, operation: str, cluster: Cluster, held: Held, size: float) -> Task:
    """A push or pull: a node's link carries its senders' bytes, a server's its share of everybody's."""
    senders = 1 if held.root_only else cluster.gpus_per_node
    servers = max(cluster.servers, 1)
    worker = cluster.inter.us_per_byte * senders
    server = cluster.server_link.us_per_byte * senders * cluster.nodes / servers
    latency = max(cluster.inter.latency_us, cluster.server_link.latency_us)
    return Task(action, SEND if operation == "push" else RECEIVE, latency, size * max(worker, server))


Volume = Callable[[int, Held], tuple[float, float]]
# (bytes through the link over what a rank holds, messages in a row)
_VOLUMES: Final[dict[str, Volume]] = {
    "all_reduce": lambda p, held: (2 * (p - 1) / p, 2.0 * (p - 1)),
    "reduce_scatter": lambda p, held: ((p - 1) / p, p - 1.0),
    "reduce": lambda p, held: (1.0, p - 1.0),
    "all_gather": lambda p, held: (float(p - 1), p - 1.0),  # of shards, or of whole payloads: what a rank holds, from all others
    "broadcast": lambda p, held: (1.0, p - 1.0),
    "all_to_all": lambda p, held: ((p - 1) / p, p - 1.0),
    "gather": lambda p, held: (float(p - 1), p - 1.0),
}


def _advance(operation: str, level: str, ranks: int, held: Held) -> None:
    """What a rank holds afterwards."""
    if operation == "reduce_scatter":
        held.share /= ranks
        held.split += (level,)
    elif operation == "all_to_all":
        held.share, held.pieces = held.share / ranks, held.pieces * ranks
        held.split += (level,)
    elif operation == "all_gather":
        if held.split and held.split[-1] == level:  # puts shards together
            held.share *= ranks
            held.split = held.split[:-1]
        else:
            held.pieces *= ranks
    elif operation == "gather":
        held.pieces *= ranks
        held.root_only = held.root_only or level == "intra"
    elif operation == "reduce":
        held.root_only = held.root_only or level == "intra"
    elif operation == "broadcast" and level == "intra":
        held.root_only = False


def task_us(task: Task, numel: float, codec: CodecCosts | None) -> float:
    """Microseconds of one task for a bucket of ``numel`` elements."""
    if not task.codec:
        return task.fixed_us + task.per_element_us * numel
    assert codec is not None
    device, _, verb = task.codec.partition(".")
    curve, elements = codec.device(device), task.share * numel * task.times
    return curve.encode(elements) if verb == "encode" else curve.decode(elements)
