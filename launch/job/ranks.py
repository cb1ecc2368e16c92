"""torch.distributed's variables for the workers that a launcher starts: scripts and libraries that read them then see the job's ranks.

Owns RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT. psgc itself reads its own variables, which are
always set beside these.

Ranks are numbered as the scheduler numbers them: node by node, on each node by local rank.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from psgc.errors import ConfigError, PsgcError

# Of a process, and of the job it is in. GROUP_RANK is the node's number: Lightning reads it.
NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
MASTER: Final = ("MASTER_ADDR", "MASTER_PORT")
# torch looks for a store that torchrun's agent serves, and Lightning for torchrun's ranks, where it finds these.
TORCHRUNS: Final = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
# Below the ports that Linux gives to outgoing connections (from 32768 on): one of those could be taken before rank 0 listens.
FREE_PORTS: Final = range(20000, 32000)


def place(sizes: Sequence[int], node: int, local_rank: int) -> dict[str, str]:
    """The rank variables of one worker. sizes: workers on each node."""
    return {
        "RANK": str(sum(sizes[:node]) + local_rank), "WORLD_SIZE": str(sum(sizes)), "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(sizes[node]), "GROUP_RANK": str(node),
    }  # fmt: skip


def meeting_place(env: Mapping[str, str]) -> dict[str, str]:
    """Where the workers of a job on this machine alone meet: what the user has set, else a free port of this machine.

    Where RANK is set, too, the variables are those of a job that this one is started from, which may be using the port.
    """
    told = {} if env.get("RANK", "").strip() else _told(env)
    return {"MASTER_ADDR": "127.0.0.1", **told, "MASTER_PORT": told.get("MASTER_PORT") or str(free_port())}


def free_port() -> int:
    """A free port. Raises PsgcError if none of 100 random ones of FREE_PORTS is free."""
    for port in random.SystemRandom().sample(FREE_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise PsgcError(f"no free port for torch.distributed between {FREE_PORTS.start} and {FREE_PORTS.stop}; set MASTER_PORT to one")


def node_sizes(env: Mapping[str, str], nodes: int, node: int, local_size: int) -> list[int]:
    """Workers on each node: PSGC_NODE_SIZES, else as many as here on every node. Raises ConfigError for sizes that are not this job's."""
    text = env.get("PSGC_NODE_SIZES", "").strip()
    if not text:
        return [local_size] * nodes
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != nodes or min(sizes) < 1:
        raise ConfigError(f"PSGC_NODE_SIZES={text!r}: expected the number of workers on each of the {nodes} nodes, as in 4,4,2")
    if sizes[node] != local_size:
        raise ConfigError(
            f"PSGC_NODE_SIZES={text!r} says that node {node} has {sizes[node]} workers, but {local_size} start here; "
            f"set it to the same on every machine, or set BYTEPS_LOCAL_SIZE={sizes[node]} here"
        )
    return sizes


def agreed_meeting_place(env: Mapping[str, str], nodes: int) -> dict[str, str]:
    """The MASTER_ADDR and MASTER_PORT of a job on several machines, the same on each: the scheduler's address and the port after its port. If all workers are
    on this machine, a free port. What the user has set takes precedence."""
    address, port = env.get("DMLC_PS_ROOT_URI", "").strip().strip("[]"), env.get("DMLC_PS_ROOT_PORT", "").strip()
    if nodes == 1 or not address or not port.isdigit():
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **_told(env)}
    # After port 65535, the highest, take the one below it.
    next_port = int(port) + 1 if int(port) < 65535 else 65534
    return {"MASTER_ADDR": address, "MASTER_PORT": str(next_port), **_told(env)}


def _told(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in MASTER if env.get(name, "").strip()}


def is_ours(host: str) -> bool:
    """Whether a process of this machine can listen at ``host``; True where the name cannot be looked up here."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
