"""The testbed's jobs as the planner sees them, where hosts share this machine's cores.

On real hosts nothing but backward uses what backward runs on. On a testbed with fewer cores than hosts, backward, codecs, the server's pass
and TCP compete for the same cores, so whatever communication computes delays backward. ``SharedCores`` owns that; the planner's own
model knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import F64, Profile
from psgc.plan.model.costs import BOTH_WAYS, CPU, GPU, MESSAGES, RECEIVE, SEND, SERVER, CodecCosts
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.problem import Problem, codec_costs

TCP_SHARE: Final = 1448 / 1514  # of an Ethernet frame's bytes, which tbf counts, those that TCP carries
UNLIMITED_GBPS: Final = 1000.0  # a link that nothing waits for: cores do the moving


@dataclass(frozen=True)
class SharedCores(Problem):
    """A job whose processes all share ``cores``, and whose model is trained on them: what communication computes delays backward.

    So it is done where backward is done: each worker's codecs and copies, and its share of what the server and the messages take. A
    message keeps a core at each end busy for as long as loopback takes for its bytes, and one for half of ``next_part_us``, which the threads
    that handle messages need.
    """

    cores: int = 1

    def tasks_of(self, option: Option, numel: F64, codec: CodecCosts) -> list[tuple[str, int, F64]]:
        return [made for task in super().tasks_of(option, numel, codec) for made in self._on_cores(*task)]

    def _on_cores(self, action: str, resource: int, us: F64) -> list[tuple[str, int, F64]]:
        workers = self.cluster.gpus
        if resource == CPU:
            return [(action, GPU, us * max(1.0, workers / self.cores))]
        if resource == SERVER:  # of all servers' time each core gives its part
            on_cores = us * self.cluster.servers / self.cores
            return [(action, GPU, on_cores), (action, SERVER, np.maximum(0.0, us - on_cores))]
        if resource == MESSAGES:
            on_cores = np.full_like(us, self.profile.overheads["next_part_us"] / 2 * workers / self.cores)
            return [(action, GPU, on_cores), (action, MESSAGES, np.maximum(0.0, us - on_cores))]
        if resource in (SEND, RECEIVE, BOTH_WAYS):
            return [(action, GPU, self._message_us(us) * workers / self.cores), (action, resource, us)]
        return [(action, resource, us)]

    def _message_us(self, travel_us: F64) -> F64:
        """What cores do for the bytes of a worker's message that keeps the link which limits it busy for so long."""
        cluster = self.cluster
        on_a_host = -(-cluster.servers // cluster.nodes) if cluster.servers_on_nodes else 1
        share = max(1.0, cluster.gpus * on_a_host / cluster.servers)  # of a server's link to a worker's, in messages
        size = travel_us / (share * cluster.inter.us_per_byte)
        return 2 * size * cluster.intra.us_per_byte


def problem_for(
    profile: Profile,
    codec: str,
    gbps: float | None,
    cores: int,
    *,
    workers: int = 2,
    servers: int = 1,
    beside: bool = False,
    delay_ms: float = 0.0,
    apart: bool = False,
) -> Problem:
    """A testbed's job: a worker a host, all links alike; without a limit a link is as fast as TCP on this machine. cores: of the machine, and fewer
    than workers and servers share them. beside: the servers run on the workers' hosts, else each has a host of its own. delay_ms: one way,
    between any two hosts. apart: every process has such a machine's cores to itself, whether this one has as many or not: for bounds."""
    loopback = profile.links["loopback"]
    hosts = workers + (0 if beside else servers)
    shared = cores < workers + servers and not apart
    of_a_host = cores if shared or apart else max(1, cores // hosts)  # which its processes start threads for
    most = UNLIMITED_GBPS if shared else loopback.gbps
    inter = Link(most if gbps is None else min(gbps * TCP_SHARE, most), loopback.latency_us + delay_ms * 1e3)
    cluster = Cluster("testbed", workers, 1, loopback, inter, servers=servers, servers_on_nodes=beside, cores=of_a_host)
    costs, constraints = codec_costs(codec, profile, workers), Constraints(servers=True)
    return SharedCores(profile, cluster, costs, constraints, cores=cores) if shared else Problem(profile, cluster, costs, constraints)
