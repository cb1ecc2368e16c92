"""One machine's facts about itself before a job starts: a record that is sent as JSON, without secrets."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from psgc import __version__
from psgc.config import Config
from psgc.errors import PsgcError, RemoteProtocolError
from psgc.launch.job.part import local_servers
from psgc.launch.job.planned import plan_here
from psgc.launch.topology import Topology
from psgc.launch.topology.devices import local_size
from psgc.plan.model.level import asks_auto
from psgc.processes.addresses import is_loopback, lookup, unmapped
from psgc.processes.cores import usable_cores

PACKAGES: Final = ("torch", "numpy", "numba", "pyzmq")
# Settings that must have one value in the whole job, and those that all workers must agree on: fields of Config.
EVERYWHERE: Final = ("nodes", "servers", "root_port", "job", "encrypt", "wire")
ON_WORKERS: Final = (
    "codec", "part_bytes", "fuse_bytes", "min_compress_bytes", "hash_fn", "hash_coefficient", "mixed_mode", "mixed_bound", "seed", "transport",
    "late_synchronization", "async_mode", "staleness", "on_worker_loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine. Sizes in bytes, -1: no limit; offsets in seconds."""

    hostname: str
    roles: tuple[str, ...]
    node: int = -1  # DMLC_WORKER_ID, of a worker
    workers: int = 0  # that this machine starts
    servers: int = 0
    server_index: int = -1  # DMLC_SERVER_ID of the first
    settings: Mapping[str, Any] = field(default_factory=dict)  # EVERYWHERE, and of workers ON_WORKERS
    plan: str = ""  # "", auto, or file
    plan_bytes: int = 0  # gradients of the plan, as float32; 0: unknown
    versions: Mapping[str, str] = field(default_factory=dict)
    curve: bool = True  # whether ZeroMQ has been built with what control messages are encrypted by
    cryptography: bool = True
    cores: int = 0
    memory: int = 0  # available
    memlock: int = -1
    files: int = -1
    cache: str = ""  # folder of compiled kernels; "": none can be written
    gpus: tuple[str, ...] = ()
    nccl: str = ""
    rdma: bool = False  # whether DMLC_ENABLE_RDMA or DMLC_ENABLE_UCX asks for it
    root: tuple[str, ...] = ()  # addresses that the scheduler's name has here
    root_name: str = ""
    addresses: tuple[str, ...] = ()  # of this machine
    node_host: tuple[str, ...] = ()  # addresses of DMLC_NODE_HOST
    interface: str = ""  # by which packets leave for the scheduler
    mtu: int = 0
    mbit: int = 0  # of that interface; 0: unknown
    fastest: tuple[str, int] = ("", 0)  # the fastest interface that is up, and its Mbit/s
    node_sizes: bool = False  # whether PSGC_NODE_SIZES is set
    clock_s: float = 0.0  # this machine's clock minus the scheduler's
    wrong: tuple[tuple[str, str, str], ...] = ()  # checks of `psgc doctor` that fail here: name, found, remedy

    @property
    def name(self) -> str:
        """The machine's name in findings."""
        parts = [f"worker {self.node}" if role == "worker" else role for role in self.roles]
        return f"{'+'.join(parts)} ({self.hostname})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Facts:
        """Raises RemoteProtocolError unless every field is there and of its type."""
        if not isinstance(document, dict) or set(document) != {each.name for each in fields(cls)}:
            raise RemoteProtocolError("a machine's facts have other fields; is the same version of psgc installed everywhere?")
        empty = cls(hostname="", roles=())
        values = {}
        for name, value in document.items():
            wanted = type(getattr(empty, name))
            if wanted is tuple and isinstance(value, list):
                value = tuple(tuple(each) if isinstance(each, list) else each for each in value)  # noqa: PLW2901
            if not isinstance(value, wanted) and not (wanted is float and isinstance(value, int)):
                raise RemoteProtocolError(f"a machine's facts: {name} is a {type(value).__name__}, expected {wanted.__name__}")
            values[name] = value
        return cls(**values)


def collect(
    config: Config, roles: tuple[str, ...], env: Mapping[str, str], machine: Topology, wrong: tuple[tuple[str, str, str], ...]
) -> Facts:
    """This machine's facts. wrong: its own checks that fail."""
    import zmq

    from psgc.codecs.jit.kernel_cache import cache_folder

    worker = "worker" in roles
    interface = _interface_to(config.root_host) if config.root_host else ""
    speeds = {nic.name: nic.mbit for nic in machine.nics if nic.up}
    fastest = max(speeds.items(), key=lambda each: each[1], default=("", 0))
    return Facts(
        hostname=socket.gethostname(), roles=roles, node=config.node if worker else -1, workers=local_size(env) if worker else 0,
        servers=local_servers(config, env) if "server" in roles else 0, server_index=config.server_index,
        settings={name: getattr(config, name) for name in (*EVERYWHERE, *(ON_WORKERS if worker else ()))},
        plan=("auto" if asks_auto(config.plan) else "file" if config.plan else "") if worker else "", plan_bytes=_plan_bytes(config.plan),
        versions={"python": platform.python_version(), "psgc": __version__, "libzmq": zmq.zmq_version(), **_versions()},
        curve=zmq.has("curve"), cryptography=_installed("cryptography"), cores=usable_cores(), memory=_memory(),
        memlock=_limit(resource.RLIMIT_MEMLOCK), files=_limit(resource.RLIMIT_NOFILE), cache=str(cache_folder() or ""),
        gpus=tuple(gpu.name for gpu in machine.gpus), nccl=_nccl() if machine.gpus else "",
        rdma=any(env.get(name, "0").strip() not in ("", "0", "zmq") for name in ("DMLC_ENABLE_RDMA", "DMLC_ENABLE_UCX")),
        root=_addresses_of(config.root_host), root_name=config.root_host, addresses=_own_addresses(), node_host=_addresses_of(config.node_host),
        interface=interface, mtu=_number(f"/sys/class/net/{interface}/mtu"), mbit=speeds.get(interface, 0), fastest=fastest,
        node_sizes=bool(env.get("PSGC_NODE_SIZES", "").strip()), wrong=wrong,
    )  # fmt: skip


def _plan_bytes(plan: str) -> int:
    try:
        found = plan_here(plan, needed=False)
    except PsgcError:
        return 0
    return 0 if found is None else sum(4 * bucket.numel for bucket in found.buckets)


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in PACKAGES if _installed(package)}


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _memory() -> int:
    """Available bytes of memory: the machine's, or those of this process's cgroup if that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return min(available, limit - used) if limit else available


def _limit(which: int) -> int:
    hard = resource.getrlimit(which)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""  # type: ignore[no-untyped-call]


def _addresses_of(host: str) -> tuple[str, ...]:
    """All addresses of a name; none if it has none."""
    if not host:
        return ()
    try:
        return tuple(sorted({unmapped(str(address[0])) for _, address in lookup(host, 9)}))
    except OSError:
        return ()


def _own_addresses() -> tuple[str, ...]:
    found = {str(each) for each in _addresses_of(socket.gethostname())}
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((remote, 9))  # sends nothing: picks the default route
                found.add(str(probe.getsockname()[0]))
        except OSError:
            continue
    return tuple(sorted(address for address in found if not is_loopback(address)))


def _interface_to(host: str) -> str:
    """The interface by which packets for ``host`` leave, over IPv4; "" if that is unknown."""
    addresses = [address for address in _addresses_of(host) if ":" not in address]
    if not addresses:
        return ""
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return ""
    if is_loopback(addresses[0]):
        return "lo"
    target = int.from_bytes(socket.inet_aton(addresses[0]), "little")
    matching = [row for row in rows if target & int(row[7], 16) == int(row[1], 16)]
    return max(matching, key=lambda row: int(row[7], 16).bit_count(), default=[""])[0]


def _number(file: str) -> int:
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
