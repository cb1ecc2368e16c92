"""What an option costs: its actions as tasks on resources. A task's time is linear in the bucket's size, or given by a codec's curve.

Owns what each action sends and computes. Does not know when tasks run (``timeline``) or which options are chosen (``search``). ``walk`` follows
a bucket of n elements through the option, and notes after each action over which groups it is split into shards, which groups' payloads
lie side by side, whether it is encoded, and whether only a node's root works on it. None of that depends on sizes or links, so it is found once
per option, and then priced for a cluster. ``collectives`` says what a group's operation sends; a push or a pull of m bytes sends m, or the servers'
share of all ranks' bytes if that is more, in one message.

Links between nodes. Each node has one, which carries what all its active ranks send. The ring of a flat group passes each node's link once
in each direction, so the link carries what one rank's link would. In a flat all-to-all every rank of a node, and in a flat gather the root, sends
or receives through it all that does not stay within the node. The same holds for a flat reduce_scatter of jobs: they send each slice straight to the rank
that sums it, so that sums are in the order of ranks. A node of k of the p ranks then sends k (p - k) / p of a gradient's bytes, where a ring sends
(p - 1) / p. Jobs whose gradients lie in hosts' memory also gather slices in this way, while between GPUs NCCL gathers them. Between GPUs an all_reduce is a
reduce_scatter and an all_gather, and a reduce is a reduce_scatter and a gather, each by these rules.
Links within nodes. If nodes have several ranks, a flat routine uses these links as well, and the slower of both kinds sets its pace. A ring
passes each rank's link; an all-to-all and a gather pass it with what stays within the node.
Latency. Collectives run one after the other, as in an NCCL stream, so the latencies of their messages hold the link, too. The latency of a
push or a pull delays what follows in its chain, while the link is free.
Servers. A part lies on one server, whose link carries all ranks' bytes of it. Parts go to the servers in turn. So a part holds the link to servers
for its share of all servers' links, and the rest of its time delays only the part itself; a shard counts as a part. The server's pass
is counted in the same way. Servers on the workers' nodes share their NICs: a push and a pull then hold both directions, for what a node's ranks
and servers exchange with other nodes. A server adds every payload of a part and finishes the sum once. If the profile has times of ``none``, workers
also copy what is not encoded into slots and out of them.
Roots and switches. If a node has reduction roots, only these own shards of its sums, so each has more to send, encode and decode; other ranks send
their whole gradient to the roots and exchange nothing else. If its GPUs are behind several PCIe switches, floats are summed behind each switch first,
over ``[intra]``, and then between the switches, slice by slice, through the host's memory (``[host]``, or ``[intra]`` if that is not given).
Codecs. Decoding costs time for each piece: the p payloads of an all-gather have p times as many elements as one. A node's CPU works for its active
ranks one after the other. What is not encoded travels in gradients' own type by options that encode nothing, and as float32
by all others. Of a pair ``push/pull``, the first encoding of an option is by the push codec, and all later ones are by the pull codec, servers' included:
so are bytes and times. If the cluster says how many threads workers have, each worker encodes and decodes that many parts at once. A server
sums as many parts at once as it has threads.
Copies. If the cluster has a link between a GPU and its host, gradients are on the GPU, and copies pass that link, which has a lane for each
direction: to the host before the CPU encodes or decodes and before a push; to the GPU before it encodes or decodes, before a collective within a node,
and at the end. Collectives between nodes start from where the bytes are; without GPUDirect, what a GPU sends and receives is copied through the host.
If jobs run collectives through hosts' memory (``collectives = "host"`` in the cluster's file), each rank's bytes are copied there before the first
collective, and stay until the GPU decodes them, or until the end.
Messages. One thread at each end handles them. What an operation of a part costs besides its bytes is its carrier's (``psgc/plan/inputs/carriers.py``):
``each_us`` is the time for which a push, a pull or a collective keeps the threads busy, whatever its bytes, and ``lone_us`` the time that it takes if nothing
else is under way. A server's thread does this for every rank. So many small operations cost their number. Payloads to servers go over TCP, or through shared
memory where all processes are on one machine; collectives of jobs through hosts' memory use one carrier within a node and another between nodes, and those
from GPU to GPU NCCL. A library's rings cost nothing besides their links. No carrier moves bytes faster than its own rate, whatever the link.
Cores. Where communication shares all cores with backward (``cores``), its work holds the lane that backward computes on: codecs, copies, sums, the handling of
messages, and bytes, each of which keeps a core at either end busy for as long as the carrier takes for it.
Sources: Thakur et al. 2005 for collectives; Wang et al. 2023 (Espresso), table 3, for which action may follow which.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from psgc.errors import UsageError
from psgc.plan.inputs.carriers import FREE, SHM, TCP, CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import F64, FLOAT_BYTES, CostCurve, least_slope, on_curve
from psgc.plan.model.collectives import (
    RINGS,
    TREE_VOLUME,
    Collectives,
    levels_of_a_tree,
    volume_and_messages,
)
from psgc.plan.model.cores import Sharing
from psgc.plan.model.options import Option, is_uncompressed
from psgc.plan.model.plan import UNCOMPRESSED

GPU, CPU, INTRA, SEND, RECEIVE, SERVER, MESSAGES, TO_HOST, TO_GPU = range(9)
RESOURCES: Final = ("gpu", "cpu", "intra", "inter-send", "inter-receive", "server", "messages", "to-host", "to-gpu")
LINKS: Final = frozenset(RESOURCES[link] for link in (INTRA, SEND, RECEIVE))  # the names of the links between GPUs
ALWAYS: Final = 6  # the first 6 of RESOURCES occur in any job, the others only if the profile or the cluster has times for them
BOTH_WAYS: Final = -1  # a collective between nodes: holds SEND and RECEIVE together
ALL_LINKS: Final = -2  # a collective over all ranks, several of them on a node: also holds INTRA; the slower link sets the pace
IN_FLIGHT: Final = -3  # a message's latency, and what a server's own link and pass add to a lone part: holds no resource
_HELD: Final = {BOTH_WAYS: (SEND, RECEIVE), ALL_LINKS: (INTRA, SEND, RECEIVE), IN_FLIGHT: ()}
NO_COPIES, COPIES, ALL_ON_HOSTS = range(3)
RAW: Final = "raw:"  # prefix of a curve's name: the times of ``none``
PULL: Final = "pull:"  # and those of the pull codec


def resources_of(resource: int) -> tuple[int, ...]:
    """The resources that a task on ``resource`` holds at the same time."""
    return _HELD.get(resource, (resource,))


def threads(cluster: Cluster) -> tuple[int, ...]:
    """The number of tasks that each of RESOURCES does at once."""
    at_once = {CPU: cluster.threads_of_a_worker, SERVER: cluster.threads_of_a_server}
    return tuple(at_once.get(resource, 1) for resource in range(len(RESOURCES)))


class Held(NamedTuple):
    """What a rank holds between two actions. shards: the groups over which elements are split, innermost last; pieces: the groups whose ranks'
    payloads lie side by side; root_only: only one rank of each node holds anything; on_host: the bytes lie in the host's memory, not the GPU's; again: the
    first encoding is over, so that payloads are the pull codec's; as_is: the option encodes nothing, so that gradients keep their type (set only where that
    matters, which is where they are no float32)."""

    shards: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    encoded: bool = False
    root_only: bool = False
    on_host: bool = False
    again: bool = False
    as_is: bool = False


class Atom(NamedTuple):
    """An action, and what a rank holds before it. last: whether the option ends with it."""

    action: str
    held: Held
    last: bool = False


Points = tuple[tuple[float, ...], tuple[float, ...]]  # sizes in elements, and microseconds


class Task(NamedTuple):
    """One action on one resource. It takes ``fixed_us + per_element_us * n`` for n elements, or what ``points`` say, or ``factor`` times what a codec's
    curve says for ``share * times * n`` elements.

    curve: "" for none, else "gpu.encode", "cpu.decode", "server.sum:4" (a server's pass over 4 payloads), ..., with the prefix RAW if nothing is encoded,
    PULL for the pull codec's.
    points: microseconds by elements of the bucket, linear between them, as a CostCurve has them; () for none."""

    action: str
    resource: int
    fixed_us: float
    per_element_us: float
    curve: str = ""
    share: float = 1.0
    times: float = 1.0
    factor: float = 1.0
    points: tuple[()] | Points = ()

    @property
    def is_curve(self) -> bool:
        return bool(self.curve or self.points)


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """What a plan needs to know of a codec.

    bytes_per_element:      of payloads of an option's first encoding.
    pull_bytes_per_element: of payloads of later encodings, and of those that servers answer with; None: the same.
    curves:                 times by device. ``server`` decodes to add one payload, and encodes to finish the sum; without it ``cpu`` counts.
    pull_curves:            times of later encodings, on the same devices; None: the same.
    raw:                    the curves of ``none``, by device.
    carriers:               what carriers cost, by name.
    item_bytes:             of an uncompressed element, as gradients are."""

    name: str
    bytes_per_element: float
    curves: Mapping[str, CostCurve]
    pull_bytes_per_element: float | None = None
    raw: Mapping[str, CostCurve] = field(default_factory=dict)
    carriers: Mapping[str, CarrierCosts] = field(default_factory=dict)
    pull_curves: Mapping[str, CostCurve] | None = None
    item_bytes: float = float(FLOAT_BYTES)

    def of_items(self, item_bytes: float) -> CodecCosts:
        """The same codec's costs for gradients of another type."""
        if item_bytes == self.item_bytes:
            return self
        return replace(self, item_bytes=item_bytes, bytes_per_element=item_bytes if self.name == UNCOMPRESSED else self.bytes_per_element)

    @property
    def back(self) -> float:
        """Bytes per element of payloads that are not of the first encoding."""
        return self.bytes_per_element if self.pull_bytes_per_element is None else self.pull_bytes_per_element

    def held_bytes(self, held: Held) -> float:
        """Bytes per element of what a rank holds."""
        if held.encoded:
            return self.back if held.again else self.bytes_per_element
        return self.item_bytes if held.as_is else FLOAT_BYTES

    def prefix(self, held: Held) -> str:
        """Of the curve by which a payload is written or read after what a rank holds."""
        return PULL if held.again and self.pull_curves is not None else ""

    def device(self, name: str) -> CostCurve:
        curve = self.curves.get(name) or (self.curves.get("cpu") if name == "server" else None)
        if curve is None:
            raise UsageError(f"codec {self.name}: the profile has no times for it on {name}; measure them with psgc profile")
        return curve

    def knows(self, device: str) -> bool:
        return device in self.curves

    @property
    def served(self) -> bool:
        """Whether the codec has times on servers."""
        return "server" in self.curves or "cpu" in self.curves

    def has(self, task: Task) -> bool:
        """Whether the codec has times for the task."""
        device = task.curve.partition(".")[0].removeprefix(PULL)
        return not task.curve or device.startswith(RAW) or (self.served if device == "server" else device in self.curves)

    def task_us(self, task: Task, numel: float) -> float:
        """Microseconds of one task for a bucket of ``numel`` elements."""
        return float(self.all_us(task, np.array([numel]))[0])

    def all_us(self, task: Task, numel: F64) -> F64:
        """Microseconds of one task for buckets of these numbers of elements."""
        if task.is_curve:
            return on_curve(*self.points(task), task.share * task.times * numel)
        return task.fixed_us + task.per_element_us * numel

    def least_us_per_element(self, task: Task) -> float:
        """Lower bound on the microseconds per element, whatever the bucket's size."""
        return task.share * task.times * least_slope(*self.points(task)) if task.is_curve else task.per_element_us

    def points(self, task: Task) -> Points:
        """The sizes in elements, and the microseconds, of the points of a task's curve."""
        if task.points:
            return task.points
        device, _, verb = task.curve.removeprefix(RAW).removeprefix(PULL).partition(".")
        curve = self.raw_device(device) if task.curve.startswith(RAW) else self.device(device)
        if task.curve.startswith(PULL) and self.pull_curves is not None:
            curve = self.pull_curves.get(device, curve)
        us = curve.encode_us if verb == "encode" else curve.decode_us if verb == "decode" else curve.sum_us(float(verb.partition(":")[2]))
        return curve.numel, us if task.factor == 1 else tuple(each * task.factor for each in us)

    def raw_device(self, name: str) -> CostCurve:
        return self.raw.get(name) or self.raw["cpu"]


@functools.cache
def walk(option: Option, copies: int = NO_COPIES, typed: bool = False) -> tuple[tuple[Atom, ...], Held]:
    """The option's atoms, and what a rank holds after them. copies: the cluster's ``copies_of``; with NO_COPIES neither ``on_host`` nor ``last`` is
    set. typed: whether some gradients are no float32."""
    held, atoms = Held(as_is=typed and is_uncompressed(option)), []
    for number, action in enumerate(option):
        # Of floats it makes no difference what they have been, and atoms that are the same are shared by options.
        seen = held if held.encoded or "@" in action else held._replace(again=False)
        atoms.append(Atom(action, seen, copies != NO_COPIES and number == len(option) - 1))
        held = _then(action, held, copies)
    return tuple(atoms), held._replace(again=False, as_is=False)


@functools.cache  # thousands of options consist of a few hundred actions after what was held before
def _then(action: str, held: Held, copies: int) -> Held:
    return _after(action, held)._replace(on_host=copies != NO_COPIES and _on_host(action, held, copies == ALL_ON_HOSTS))


def copies_of(cluster: Cluster) -> int:
    """Which copies between GPUs and hosts cost time: none, those that an option needs, or those of collectives through hosts' memory, too."""
    return NO_COPIES if cluster.host is None else ALL_ON_HOSTS if cluster.collectives == "host" else COPIES


def _on_host(action: str, held: Held, exchanged: bool = False) -> bool:
    """Whether the result of an action lies in the host's memory. exchanged: whether all collectives run through the host's memory."""
    if "@" in action:
        return action.endswith("@cpu")
    level, operation = action.split(".")[:2]
    return exchanged or operation in ("push", "pull") or (held.on_host and level != "intra")


def _after(action: str, held: Held) -> Held:
    if action.startswith("comp@"):
        return held._replace(encoded=True)
    if action.startswith("decomp@"):
        return held._replace(encoded=False, pieces=(), again=True)
    level, operation = action.split(".")[:2]
    if action.endswith(".pull.c"):
        held = held._replace(again=True)
    if operation == "all_gather" and held.shards[-1:] == (level,):  # puts shards together
        return held._replace(shards=held.shards[:-1])
    if operation in ("reduce_scatter", "all_to_all"):
        held = held._replace(shards=(*held.shards, level))
    if operation in ("all_to_all", "all_gather", "gather"):
        held = held._replace(pieces=(*held.pieces, level))
    if operation in ("reduce", "gather") and level == "intra":
        return held._replace(root_only=True)
    return held._replace(root_only=held.root_only and not (operation == "broadcast" and level == "intra"))


def tasks(
    option: Option, cluster: Cluster, codec: CodecCosts, collectives: Collectives = RINGS, sharing: Sharing | None = None
) -> tuple[Task, ...]:
    """The option's tasks, in order; see the module's text."""
    typed = codec.item_bytes != FLOAT_BYTES
    return tuple(task for atom in walk(option, copies_of(cluster), typed)[0] for task in price(atom, cluster, codec, collectives, sharing))


def price(atom: Atom, cluster: Cluster, codec: CodecCosts, collectives: Collectives = RINGS, sharing: Sharing | None = None) -> list[Task]:
    """An atom's tasks, with its copies between GPU and host. A group of one rank has no task, a push or a pull may have several. sharing: of the cores
    that backward computes on, None if communication has cores of its own."""
    action, held, last = atom
    share, pieces = _parts(held, cluster)
    made = _work(action, held, share, pieces, cluster, codec, collectives, sharing)
    if cluster.host is None:
        return made
    size = share * pieces * codec.held_bytes(held)
    level, operation = ("", "") if "@" in action else action.split(".")[:2]
    on_hosts = bool(level) and copies_of(cluster) == ALL_ON_HOSTS
    if action.endswith("@cpu") or operation in ("push", "pull") or on_hosts:
        made = _copy(action, TO_HOST, 0.0 if held.on_host else size, cluster.host) + made
    elif action.endswith("@gpu") or level == "intra":
        made = _copy(action, TO_GPU, size if held.on_host else 0.0, cluster.host) + made
    elif made and not cluster.gpudirect and not held.on_host:
        passes = size * volume_and_messages(operation, _ranks(level, cluster), collectives)[0]
        made = [*_copy(action, TO_HOST, passes, cluster.host), *made, *_copy(action, TO_GPU, passes, cluster.host)]
    whole = codec.held_bytes(held._replace(encoded=False))
    return made + _copy(action, TO_GPU, whole if last and _on_host(action, held, on_hosts) else 0.0, cluster.host)


def _copy(action: str, resource: int, size: float, link: Link) -> list[Task]:
    """A copy of ``size`` bytes per element; no task if ``size`` is 0."""
    return [Task(action, resource, link.latency_us, size * link.us_per_byte)] if size else []


def _parts(held: Held, cluster: Cluster) -> tuple[float, float]:
    """The share of a bucket's elements that a rank holds, and how many ranks' payloads of them."""
    share, pieces = 1.0, 1.0
    for level in held.shards:
        share /= _owners(cluster) if level == "intra" else _ranks(level, cluster)
    for level in held.pieces:
        pieces *= _ranks(level, cluster)
    return share, pieces


def _work(
    action: str, held: Held, share: float, pieces: float, cluster: Cluster, codec: CodecCosts, collectives: Collectives, sharing: Sharing | None
) -> list[Task]:  # fmt: skip
    """An atom's tasks, without the copies between GPU and host."""
    if "@" in action:
        made = _codec_task(action, share, pieces, _turns(_active(held, cluster), cluster) if sharing is None else 1.0, codec.prefix(held))
        return _beside_backward(made, _active(held, cluster), cluster, sharing)
    level, operation = action.split(".")[:2]
    if operation in ("push", "pull"):
        return _with_server(action, cluster, held, share, codec, sharing)
    ranks = _ranks(level, cluster)
    if ranks == 1:
        return []
    size = share * pieces * codec.held_bytes(held)
    carrier = _carrier_of(level, cluster, codec, collectives).with_members(ranks)
    begun = _handling(action, carrier.each_us, carrier.each_us, _active(held, cluster), cluster, sharing)
    late = [Task(action, IN_FLIGHT, carrier.late_us, 0.0)] if carrier.late_us else []
    moving = 2 * size * volume_and_messages(operation, ranks, collectives)[0] * carrier.us_per_byte
    begun += _on_cores(action, 0.0, moving, _active(held, cluster), cluster, sharing)
    slowest = carrier.us_per_byte * _besides(_active(held, cluster), cluster, sharing)
    if level == "intra" and not held.encoded and _switches(cluster) > 1 and operation != "all_reduce":
        return [*begun, *_by_switch(action, operation, size, cluster), *late]
    if operation not in collectives.in_two:
        return [*begun, _collective(action, operation, held, size, cluster, collectives, slowest), *late]
    first, second = collectives.in_two[operation]
    one = _collective(action, first, held, size, cluster, collectives, slowest)
    other = _collective(action, second, held, size / ranks, cluster, collectives, slowest)
    both = one._replace(fixed_us=one.fixed_us + other.fixed_us, per_element_us=one.per_element_us + other.per_element_us)
    return [*begun, both, *late]


def _carrier_of(level: str, cluster: Cluster, codec: CodecCosts, collectives: Collectives) -> CarrierCosts:
    """What the carrier of a group's operations costs beside its link."""
    within = level == "intra" or (level == "flat" and cluster.nodes == 1) or cluster.shares_memory
    return codec.carriers.get(collectives.within if within else collectives.between, FREE)


def _handling(action: str, busy_us: float, of_a_message_us: float, active: int, cluster: Cluster, sharing: Sharing | None) -> list[Task]:
    """The threads that handle messages, for so long, at either end of a part's operation; of_a_message_us: of its own message."""
    if sharing is None or not busy_us:
        return [Task(action, MESSAGES, busy_us, 0.0)] if busy_us else []
    on_cores = _on_cores(action, of_a_message_us, 0.0, active, cluster, sharing)
    rest_us = max(0.0, busy_us - sum(task.fixed_us for task in on_cores))
    return [*on_cores, *([Task(action, MESSAGES, rest_us, 0.0)] if rest_us else [])]


def _on_cores(action: str, fixed_us: float, per_element_us: float, active: int, cluster: Cluster, sharing: Sharing | None) -> list[Task]:
    """The delay of backward by work of each of a node's ``active`` ranks on cores that it shares; no task if it shares none."""
    if sharing is None or not (fixed_us or per_element_us):
        return []
    load = _active_on_a_machine(active, cluster) / sharing.cores
    return [Task(action, GPU, fixed_us * load, per_element_us * load)]


def _besides(active: int, cluster: Cluster, sharing: Sharing | None) -> float:
    """The share of work on cores for which backward is not delayed, so that it takes time elsewhere."""
    return 1.0 if sharing is None else max(0.0, 1 - _active_on_a_machine(active, cluster) / sharing.cores)


def _beside_backward(made: Task, active: int, cluster: Cluster, sharing: Sharing | None) -> list[Task]:
    """A codec's task on a CPU, of each of a node's ``active`` ranks; of cores that backward shares, backward is delayed by its share of them."""
    if sharing is None or made.resource != CPU:
        return [made]
    return _divided(made, _active_on_a_machine(active, cluster) / sharing.cores)


def _divided(made: Task, load: float) -> list[Task]:
    """A task of which ``load`` times its length delays backward, while the rest takes time elsewhere."""
    if not load:
        return [made]
    return [made._replace(resource=GPU, factor=made.factor * load), *([made._replace(factor=made.factor * (1 - load))] if load < 1 else [])]


def _active_on_a_machine(active: int, cluster: Cluster) -> int:
    return active * (cluster.nodes if cluster.one_machine else 1)


def _collective(action: str, operation: str, held: Held, size: float, cluster: Cluster, collectives: Collectives, carried: float) -> Task:
    """One operation of a group. size: the bytes that a rank of the group holds, per element of the bucket; carried: the carrier's microseconds per byte."""
    level = action.partition(".")[0]
    ranks = _ranks(level, cluster)
    volume, messages = volume_and_messages(operation, ranks, collectives)
    if level == "intra" and operation in ("reduce_scatter", "all_to_all") and _owners(cluster) < ranks:
        volume = max(1.0, (ranks - 1) / _owners(cluster))  # ranks that are no root send each root its whole shard, and own none
    straight = operation in collectives.straight
    if level == "intra" or (level == "flat" and cluster.nodes == 1):
        resource, latency_us, us_per_byte = INTRA, cluster.intra.latency_us, cluster.intra.us_per_byte
    else:
        between = _ranks_on_the_link(level, operation, cluster, held, straight) * cluster.inter.us_per_byte
        resource, latency_us, us_per_byte = BOTH_WAYS, cluster.inter.latency_us, between
        if level == "flat" and cluster.gpus_per_node > 1:
            stays = (cluster.gpus_per_node - 1) / (ranks - 1) if straight else 1.0
            resource, latency_us = ALL_LINKS, max(cluster.intra.latency_us, latency_us)
            us_per_byte = max(stays * cluster.intra.us_per_byte, between)
    per_byte = max(us_per_byte, carried)
    ring = Task(action, resource, messages * latency_us, volume * size * per_byte)
    return _or_tree(ring, TREE_VOLUME * size * per_byte, level, cluster) if operation == "all_reduce" and collectives.trees else ring


def _or_tree(ring: Task, per_element_us: float, level: str, cluster: Cluster) -> Task:
    """An all_reduce around a ring, or over a tree where that is quicker. per_element_us: of the tree."""
    within = (cluster.gpus_per_node if level != "inter" else 1) - 1
    between = levels_of_a_tree(cluster.nodes) if level != "intra" else 0
    fixed_us = 2 * (between * cluster.inter.latency_us + within * cluster.intra.latency_us)
    if fixed_us >= ring.fixed_us:
        return ring
    if per_element_us <= ring.per_element_us:
        return ring._replace(fixed_us=fixed_us, per_element_us=per_element_us)
    alike = (ring.fixed_us - fixed_us) / (per_element_us - ring.per_element_us)  # elements
    sizes = (0.0, alike, 2 * alike)
    us = (fixed_us, fixed_us + per_element_us * alike, ring.fixed_us + ring.per_element_us * 2 * alike)
    return ring._replace(fixed_us=0.0, per_element_us=0.0, points=(sizes, us))


def _by_switch(action: str, operation: str, size: float, cluster: Cluster) -> list[Task]:
    """A node's collective of floats in two stages: behind each switch, and between the switches through the host's memory."""
    across, between = _switches(cluster), cluster.host or cluster.intra
    behind = cluster.pcie_switch_size
    volume, messages = volume_and_messages(operation, behind, RINGS)
    volume_across, messages_across = volume_and_messages(operation, across, RINGS)
    whole = operation in ("reduce", "broadcast")  # one rank behind each switch goes on with the sum; else each with a slice
    within_size, across_size = (size, size) if whole else (size, size / behind) if operation == "reduce_scatter" else (size * across, size)
    return [
        Task(action, INTRA, messages * cluster.intra.latency_us, volume * within_size * cluster.intra.us_per_byte),
        Task(action, INTRA, messages_across * between.latency_us, volume_across * across_size * between.us_per_byte),
    ]


def _switches(cluster: Cluster) -> int:
    """The number of a node's switches behind which sums are taken first; 1: no such stage."""
    return cluster.gpus_per_node // cluster.pcie_switch_size if 1 < cluster.pcie_switch_size < cluster.gpus_per_node else 1


def _owners(cluster: Cluster) -> int:
    """The number of a node's ranks that own shards of its sums."""
    return len(cluster.reduce_roots) or cluster.gpus_per_node


def _active(held: Held, cluster: Cluster) -> int:
    """The number of a node's ranks that hold anything."""
    return 1 if held.root_only else _owners(cluster) if "intra" in held.shards else cluster.gpus_per_node


def _message(action: str, resource: int, us_per_element: float, latency_us: float, late_us_per_element: float) -> list[Task]:
    """A push or a pull: a task that holds a link, and one for the time in which it is late but holds no link."""
    travel = Task(action, resource, 0.0, us_per_element)
    late = Task(action, IN_FLIGHT, latency_us, late_us_per_element)
    return [travel, late] if latency_us or late_us_per_element else [travel]


def _ranks(level: str, cluster: Cluster) -> int:
    if level == "flat":
        return cluster.gpus
    return cluster.gpus_per_node if level == "intra" else cluster.nodes


def _turns(active: int, cluster: Cluster) -> float:
    """The factor by which ``active`` ranks that encode on one node's CPU slow each other down."""
    if not cluster.has_threads:
        return float(active)
    return max(1.0, active / cluster.cores) if cluster.cores else 1.0


def _codec_task(action: str, share: float, pieces: float, turns: float, prefix: str) -> Task:
    """The task that encodes or decodes. Each rank has its own GPU, but a node's ranks share its CPU. prefix: of the curve's name."""
    verb, _, device = action.partition("@")
    resource, ranks = (GPU, 1.0) if device == "gpu" else (CPU, turns)
    if verb == "comp":
        return Task(action, resource, 0.0, 0.0, f"{prefix}{device}.encode", share, ranks)
    return Task(action, resource, 0.0, 0.0, f"{prefix}{device}.decode", share, pieces * ranks)


def _ranks_on_the_link(level: str, operation: str, cluster: Cluster, held: Held, straight: bool) -> float:
    """The bytes on a node's link, in units of one rank's. straight: messages go straight to their destination, not around a ring."""
    k = cluster.gpus_per_node
    if level == "inter":
        return float(_active(held, cluster))
    if straight:
        beyond_the_node = (cluster.gpus - k) / (cluster.gpus - 1)
        return beyond_the_node if operation == "gather" else k * beyond_the_node
    return 1.0


def _with_server(action: str, cluster: Cluster, held: Held, share: float, codec: CodecCosts, sharing: Sharing | None) -> list[Task]:
    """A push and the server's pass after it, or a pull; see the module's text."""
    senders = _active(held, cluster)
    servers = max(cluster.servers, 1)
    spread = min(servers, senders) if share < 1 else 1  # number of servers that hold shards of one part
    everybody = senders * cluster.nodes
    carrier = codec.carriers.get(SHM if cluster.shares_memory else TCP, FREE)
    carried = carrier.us_per_byte * _besides(senders, cluster, sharing)
    worker = max(cluster.inter.us_per_byte * senders, carried)
    of_a_server = max(cluster.server_link.us_per_byte, carried)
    server = of_a_server * everybody / servers
    alone = of_a_server * everybody / spread
    away = 1.0
    if cluster.servers_on_nodes:  # a node's NIC carries both ends; what a node's ranks send to its own servers stays there
        away = (cluster.nodes - 1) / cluster.nodes
        on_a_node = -(-servers // cluster.nodes)  # servers on the node that has most
        of_a_node = max(cluster.inter.us_per_byte * on_a_node, carried)
        worker, server, alone = worker * away, of_a_node * everybody / servers * away, alone * away
    latency = max(cluster.inter.latency_us, cluster.server_link.latency_us)
    push = ".push" in action
    size = share * codec.held_bytes(held if push else held._replace(again=True))
    held_us = size * max(worker, server)
    link = BOTH_WAYS if cluster.servers_on_nodes else SEND if push else RECEIVE
    busy_us = carrier.each_us * max(1.0, everybody / servers)
    late_us = carrier.late_us + carrier.each_us * max(1.0, everybody / spread) - busy_us
    ends = 2 if cluster.servers_of_a_machine else 1  # of a message that are on a machine of workers
    travel = _handling(action, busy_us, carrier.each_us, senders, cluster, sharing)
    travel += _on_cores(action, 0.0, ends * size * away * carrier.us_per_byte, senders, cluster, sharing)
    travel += _message(action, link, held_us, latency + late_us, max(0.0, size * alone - held_us))
    copies = not held.encoded and "cpu" in codec.raw
    raw = "" if held.encoded else RAW
    if not push:
        copy = Task(action, CPU, 0.0, 0.0, f"{RAW}cpu.decode", share)
        return [*travel, *_beside_backward(copy, senders, cluster, sharing)] if copies else travel
    made = _beside_backward(Task(action, CPU, 0.0, 0.0, f"{RAW}cpu.encode", share), senders, cluster, sharing) if copies else []
    made += travel
    if held.encoded or copies:
        summed = Task(action, SERVER, 0.0, 0.0, f"{raw}server.sum:{everybody * share:g}", 1 / servers)
        made += _divided(summed, 0.0 if sharing is None else sharing.servers / sharing.cores)
        if servers > spread:
            made.append(summed._replace(resource=IN_FLIGHT, share=1 / spread - 1 / servers))
    return made
