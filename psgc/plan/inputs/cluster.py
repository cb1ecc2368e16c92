"""The machines that a plan is for: nodes, GPUs, links, spare CPU servers; from a TOML file or by name.

    nodes = 8                  # machines with GPUs
    gpus_per_node = 8
    servers = 0                # machines, or processes on the nodes, that sum
    servers_on_nodes = false   # whether they are processes on the nodes, and use the nodes' links
    one_machine = false        # whether all workers and servers run on one machine, whose cores they share
    over_tcp = false           # with one_machine: whether they reach each other over TCP all the same, not through shared memory
    cores = 32                 # of each machine, if codec times are of one thread; see below
    codec_threads = 4          # of each GPU's worker (PSGC_CPU_THREADS); as a job starts them on these cores if left out
    server_threads = 4         # of each server (PSGC_SERVER_THREADS); likewise
    reduce_roots = [2, 3]      # the only local ranks that own shards of a node's sums (BYTEPS_REDUCE_ROOTS); all ranks if left out
    pcie_switch_size = 4       # GPUs behind each PCIe switch, which sum first (BYTEPS_PCIE_SWITCH_SIZE); no such stage if left out
    collectives = "nccl"       # how jobs run collectives of gradients on GPUs: "nccl", or "host", through the hosts' memory; see below if left out
    gpudirect = true           # whether collectives between nodes bypass the host's memory; matters only with [host]
    [intra]                    # between the GPUs of a node: each GPU's, one way
    gbps = 1200
    latency_us = 8
    kind = "NVLink"            # in words, for people; may be left out
    [inter]                    # between nodes: each node's, one way, shared by its GPUs
    gbps = 100
    latency_us = 20
    [server]                   # a server's link; as [inter] if left out
    gbps = 100
    latency_us = 20
    [host]                     # between a GPU and its host's memory: each GPU's, one way; copies cost nothing if left out
    gbps = 100                 # PCIe 3.0 x16: 12.5 GB/s achieved
    latency_us = 10

A worker encodes and decodes as many parts at once as it has threads, and a server sums as many as it has. Codec times are then for one thread, as
``psgc profile`` measures them. Without ``cores`` and ``codec_threads``, codec times are for a node's whole CPU, which encodes or decodes one part
at a time, for one rank after the other.

With ``[host]``, gradients are on GPUs, and what the CPU encodes or servers receive is copied first. Without it, copies cost nothing; so it is for
jobs that train on CPUs, and for the ready-made clusters of published results.

With ``collectives = "host"``, what ranks exchange with each other is copied to the hosts' memory first, and ``[intra]`` is the rate that a node's
ranks reach there. Without ``collectives``, a plan that is to be run is made for that, since jobs do it unless their settings say otherwise, at no more within a
node than the rate of ``[host]``; other plans take the links for the GPUs', as published results do.

Owns the file's format and its errors. Gbit/s are 1e9 bit/s; a latency is the fixed time of one message, from send to receipt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.documents import is_number, read_document, shown
from psgc.processes.pool import threads_of

MOST_MACHINES: Final = 1_000_000  # nodes, servers, or GPUs of a node; a larger number is a typing error
LEAST_GBPS: Final = 1e-6
TCP_SHARE: Final = 1448 / 1514  # of what an Ethernet frame of the usual size takes of a link, that which TCP carries
MOST_THREADS: Final = 1024  # of a process; a larger number is a typing error


@dataclass(frozen=True, slots=True)
class Link:
    """A link in one direction. gbps: 1e9 bit/s; latency_us: of one message, whatever its size; kind: in words, for people."""

    gbps: float
    latency_us: float
    kind: str = ""

    @property
    def us_per_byte(self) -> float:
        return 8e-3 / self.gbps


@dataclass(frozen=True, slots=True)
class Cluster:
    """The file's fields, see above. source: the origin of its figures."""

    name: str
    nodes: int
    gpus_per_node: int
    intra: Link
    inter: Link
    servers: int = 0
    server: Link | None = None
    source: str = ""
    servers_on_nodes: bool = False
    cores: int = 0
    codec_threads: int = 0
    server_threads: int = 0
    host: Link | None = None
    gpudirect: bool = True
    collectives: str = ""
    reduce_roots: tuple[int, ...] = ()
    pcie_switch_size: int = 0
    one_machine: bool = False
    over_tcp: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether all processes exchange through the memory of one machine."""
        return self.one_machine and not self.over_tcp

    @property
    def workers_of_a_machine(self) -> int:
        return self.gpus if self.one_machine else self.gpus_per_node

    @property
    def servers_of_a_machine(self) -> int:
        """The number of servers on a machine that has workers, the one that has most."""
        return self.servers if self.one_machine else -(-self.servers // self.nodes) if self.servers_on_nodes else 0

    @property
    def inside(self) -> dict[str, str]:
        """The cluster's settings of its nodes' inside, as environment variables."""
        found = {"BYTEPS_REDUCE_ROOTS": ",".join(map(str, self.reduce_roots)), "BYTEPS_PCIE_SWITCH_SIZE": str(self.pcie_switch_size or "")}
        return {name: text for name, text in found.items() if text}

    @property
    def has_threads(self) -> bool:
        """Whether codec times are for one thread of a worker, not for a node's whole CPU."""
        return bool(self.cores or self.codec_threads)

    @property
    def threads_of_a_worker(self) -> int:
        """The number of parts that a worker encodes or decodes at once."""
        workers = self.workers_of_a_machine
        most = max(1, self.cores // workers) if self.cores else MOST_THREADS
        return min(most, self.codec_threads or (threads_of(self.cores, workers) if self.cores else 1))

    @property
    def threads_of_a_server(self) -> int:
        """The number of parts that a server sums at once."""
        return min(self.cores or MOST_THREADS, self.server_threads or (threads_of(self.cores) if self.cores else 1))

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def server_link(self) -> Link:
        return self.inter if self.servers_on_nodes else self.server or self.inter

    def to_json(self) -> dict[str, Any]:
        """The fields that ``read_cluster`` reads. Fields with their default are left out, except the number of servers."""
        return {
            one.name: _link_json(value) if isinstance(value, Link) else list(value) if isinstance(value, tuple) else value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default or one.name == "servers"
        }

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """The text of a file that ``load_cluster`` reads. comments: comments by the name of the field or the link that they stand beside."""
        links = {"intra": self.intra, "inter": self.inter, "server": self.server, "host": self.host}
        head = (
            f"name = {_quoted(self.name)}\nnodes = {self.nodes}\ngpus_per_node = {self.gpus_per_node}\nservers = {self.servers}\n"
            f"servers_on_nodes = {str(self.servers_on_nodes).lower()}\n"
            + "".join(f"{key} = true\n" for key in ("one_machine", "over_tcp") if getattr(self, key))
            + "".join(f"{key} = {value}\n" for key in THREADS if (value := getattr(self, key)))
            + (f"reduce_roots = {list(self.reduce_roots)}\n" if self.reduce_roots else "")
            + (f"pcie_switch_size = {self.pcie_switch_size}\n" if self.pcie_switch_size else "")
            + (f"collectives = {_quoted(self.collectives)}\n" if self.collectives else "")
            + ("" if self.gpudirect else "gpudirect = false\n")
            + f"source = {_quoted(self.source)}\n"
        )
        text = head + "".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in _link_json(link).items())
            for name, link in links.items()
            if link is not None
        )
        for name, comment in (comments or {}).items():
            line = re.search(rf"^(?:\[{name}\]|{name} = .*)$", text, re.MULTILINE)
            if line is not None:
                text = f"{text[: line.end()]}  # {comment}{text[line.end() :]}"
        return text


def _link_json(link: Link) -> dict[str, Any]:
    return {"gbps": float(link.gbps), "latency_us": float(link.latency_us), **({"kind": link.kind} if link.kind else {})}


def _toml(value: float | str) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON's strings are TOML's


COLLECTIVES: Final = ("", "nccl", "host")
THREADS: Final = ("cores", "codec_threads", "server_threads")
_NAMED: Final = {
    "espresso-nvlink": Cluster(
        "espresso-nvlink", 8, 8, Link(1200, 8, "NVLink"), Link(100, 20, "Ethernet"),
        source="Wang et al. 2023, section 5.1: NVLink 2.0 (150 GB/s one way), 100 Gbit/s"
    ),
    "espresso-pcie": Cluster(
        "espresso-pcie", 8, 8, Link(100, 10, "PCIe"), Link(25, 20, "Ethernet"),
        source="Wang et al. 2023, section 5.1: PCIe 3.0 x16 (12.5 GB/s achieved), 25 Gbit/s"
    ),
    "cloud-8xa100-400g": Cluster(
        "cloud-8xa100-400g", 8, 8, Link(2400, 6, "NVSwitch"), Link(400, 25, "Ethernet"), source="NVSwitch, 300 GB/s one way; 4 x 100 Gbit/s"
    ),
    "cloud-8xh100-3200g": Cluster(
        "cloud-8xh100-3200g", 8, 8, Link(3600, 6, "NVSwitch"), Link(3200, 25, "Ethernet"), source="NVSwitch, 450 GB/s one way; 8 x 400 Gbit/s"
    ),
    "cloud-4xa10g-40g": Cluster(
        "cloud-4xa10g-40g", 8, 4, Link(100, 10, "PCIe"), Link(40, 40, "Ethernet"), source="PCIe 4.0 without peer access; 40 Gbit/s"
    ),
    "cloud-1xt4-10g": Cluster("cloud-1xt4-10g", 8, 1, Link(100, 10, "PCIe"), Link(10, 50, "Ethernet"), source="one GPU a node, 10 Gbit/s"),
    "two-homes-1g": Cluster(
        "two-homes-1g", 2, 1, Link(100, 10, "PCIe"), Link(1, 5000, "internet"), source="two machines over the internet, 1 Gbit/s and 5 ms"
    ),
}  # fmt: skip


def cluster_names() -> tuple[str, ...]:
    return tuple(_NAMED)


def load_cluster(text: str) -> Cluster:
    """The ready-made cluster of that name, or the one in the file. Raises UsageError naming file and field."""
    if text in _NAMED:
        return _NAMED[text]
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"cluster {text!r} is neither a file nor one of {', '.join(_NAMED)}")
    document = read_document(path, str(path), toml=True)
    return read_cluster(document, path.stem, str(path))


def read_cluster(document: Mapping[str, Any], name: str, source: str) -> Cluster:
    """A cluster from its fields. Raises UsageError naming ``source`` and the field."""
    known = {one.name for one in fields(Cluster)}
    for key in document:
        if key not in known:
            raise UsageError(f"{source}: unknown field {key!r}; expected one of {', '.join(sorted(known))}")
    nodes, gpus = (_whole(document, key, 1, source) for key in ("nodes", "gpus_per_node"))
    servers = _whole(document, "servers", 0, source) if "servers" in document else 0
    threads = {key: _whole(document, key, 1, source, most=MOST_THREADS) for key in THREADS if key in document}
    server = _link(document, "server", source) if "server" in document else None
    host = _link(document, "host", source) if "host" in document else None
    on_nodes, gpudirect = _flag(document, "servers_on_nodes", False, source), _flag(document, "gpudirect", True, source)
    one_machine, over_tcp = (_flag(document, key, False, source) for key in ("one_machine", "over_tcp"))
    if over_tcp and not one_machine:
        raise UsageError(f"{source}: field over_tcp: machines reach each other over TCP anyway; leave it out, or set one_machine")
    roots = _roots(document, gpus, source)
    switch = _whole(document, "pcie_switch_size", 1, source, most=gpus) if "pcie_switch_size" in document else 0
    if switch and gpus % switch:
        raise UsageError(f"{source}: field pcie_switch_size is {switch}, which does not divide the {gpus} GPUs of a node")
    if roots and 0 < switch < gpus:
        raise UsageError(f"{source}: fields reduce_roots and pcie_switch_size: a node has roots or several switches; leave one of them out")
    if on_nodes and server is not None:
        raise UsageError(f"{source}: field server: servers on the nodes use the link in [inter]; leave out [server] or servers_on_nodes")
    return Cluster(
        str(document.get("name", name)), nodes, gpus, _link(document, "intra", source), _link(document, "inter", source), servers, server,
        str(document.get("source", source)), on_nodes, **threads, host=host, gpudirect=gpudirect, reduce_roots=roots,
        pcie_switch_size=switch, collectives=_collectives(document, source), one_machine=one_machine, over_tcp=over_tcp,
    )  # fmt: skip


def _whole(document: Mapping[str, Any], key: str, least: int, source: str, most: int = MOST_MACHINES) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{source}: field {key} is {shown(value)}, expected a whole number of at least {least}, and {most:,} at most")
    return value


def _roots(document: Mapping[str, Any], gpus: int, source: str) -> tuple[int, ...]:
    value = document.get("reduce_roots", [])
    if not isinstance(value, list) or any(type(root) is not int or not 0 <= root < gpus for root in value) or sorted(set(value)) != value:
        raise UsageError(
            f"{source}: field reduce_roots is {shown(value)}, expected local ranks from 0 to {gpus - 1}, each once and in order"
        )
    return tuple(value)


def _collectives(document: Mapping[str, Any], source: str) -> str:
    value = document.get("collectives", "")
    if value not in COLLECTIVES:
        raise UsageError(f"{source}: field collectives is {shown(value)}, expected one of {', '.join(COLLECTIVES[1:])}, or to be left out")
    return str(value)


def _flag(document: Mapping[str, Any], key: str, default: bool, source: str) -> bool:
    value = document.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"{source}: field {key} is {shown(value)}, expected true or false")
    return value


def _link(document: Mapping[str, Any], key: str, source: str) -> Link:
    return read_link(document.get(key), key, source)


def read_link(table: Any, key: str, source: str) -> Link:
    """A link from its table, which is ``source``'s field ``key``. Raises UsageError naming both."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{source}: field {key} is missing; expected a table with gbps and latency_us")
    for field in table:
        if field not in ("gbps", "latency_us", "kind"):
            raise UsageError(f"{source}: unknown field {key}.{field}; a link has gbps and latency_us, and may have a kind")
    values = []
    for field, above in (("gbps", True), ("latency_us", False)):
        value = table.get(field)
        if not is_number(value, above=above) or (above and value < LEAST_GBPS):  # type: ignore[operator]
            raise UsageError(
                f"{source}: field {key}.{field} is {shown(value)}, expected a number {'above' if above else 'of at least'} 0 that a link can have"
            )
        values.append(float(value))  # type: ignore[arg-type]
    kind = table.get("kind", "")
    if not isinstance(kind, str) or not kind.isprintable() or len(kind) > 80:
        raise UsageError(f"{source}: field {key}.kind is {shown(kind)}, expected a few words")
    gbps, latency_us = values
    return Link(gbps, latency_us, kind)
