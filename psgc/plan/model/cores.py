"""Which of a machine's cores backward and communication share, and by how much one delays the other.

A model whose gradients lie in hosts' memory is computed on cores. Where all of a machine's cores compute, whatever else a rank does there delays backward:
codecs, copies and sums, the handling of messages, and moving their bytes. The work of a machine's ranks and servers is taken to spread over its cores
evenly, so that every rank's backward is delayed by the machine's work divided by its cores; the lane that backward computes on (``gpu``) holds that share.
Where one core for each of the machine's servers, and for one thread of communication at least, is left, nothing is shared.
Owns that rule. Does not know what the work is (``costs``).
"""

from __future__ import annotations

from typing import NamedTuple

from psgc.plan.inputs.cluster import Cluster


class Sharing(NamedTuple):
    """A machine whose cores compute backward, all of them, beside its communication. workers, servers: of the machine."""

    cores: int
    workers: int
    servers: int


def sharing_of(cluster: Cluster, compute_threads: int) -> Sharing | None:
    """Of the cluster's machines; None if communication has cores of its own. compute_threads: of each worker; 0 if not known, or not on cores."""
    if not compute_threads or not cluster.cores:
        return None
    workers, servers = cluster.workers_of_a_machine, cluster.servers_of_a_machine
    if workers * compute_threads + max(1, servers) <= cluster.cores:
        return None
    return Sharing(cluster.cores, workers, servers)
