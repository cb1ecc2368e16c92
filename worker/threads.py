"""How many threads a worker's pool has."""

from __future__ import annotations

from psgc.config import Config
from psgc.processes.cores import cores_of_node, usable_cores
from psgc.processes.pool import threads_of


def pool_threads(config: Config) -> int:
    """How many threads encode and decode: this worker's share of the node's cores, and no more than it may run on."""
    return config.cpu_threads or min(usable_cores(), threads_of(cores_of_node(bool(config.launcher)), config.local_size))
