"""The testbed's jobs as the planner sees them, where hosts share this machine's cores.

On real hosts nothing but backward uses what backward runs on. On a testbed with fewer cores than hosts, backward, codecs, the server's pass
and TCP compete for the same cores, which a cluster of ``one_machine`` says (``psgc/plan/model/cores.py``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from psgc.plan.inputs.carriers import FREE, TCP
from psgc.plan.inputs.cluster import TCP_SHARE, Cluster, Link
from psgc.plan.inputs.profile import Profile
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, codec_costs

UNLIMITED_GBPS: Final = 1000.0  # a link that nothing waits for: cores do the moving


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
    cluster = Cluster(
        "testbed", workers, 1, loopback, inter, servers=servers, servers_on_nodes=beside, cores=of_a_host, one_machine=shared, over_tcp=shared,
    )  # fmt: skip
    known = on_cores(profile) if shared else replace(on_cores(profile), compute_threads=0)
    return Problem(known, cluster, codec_costs(codec, known, workers), Constraints(servers=True))


def on_cores(profile: Profile) -> Profile:
    """The profile of a model that is computed on cores, with a thread if it does not say with how many. An older one has TCP's rate as loopback's."""
    tcp = profile.all_carriers.get(TCP, FREE)
    carriers = {**profile.all_carriers, TCP: replace(tcp, gbps=profile.links["loopback"].gbps) if math.isinf(tcp.gbps) else tcp}
    return replace(profile, device="cpu", carriers=carriers, compute_threads=profile.compute_threads or 1)
