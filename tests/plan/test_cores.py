"""Cores that backward and communication share: by hand, and as clusters and profiles say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link, load_cluster, read_cluster
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.search import search
from psgc.plan.model.cores import Sharing, sharing_of
from psgc.plan.model.costs import CPU, GPU, MESSAGES, RECEIVE, SEND, SERVER, CodecCosts, tasks
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.timeline import define_timeline

PER_ELEMENT = CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))  # 1 us an element, encoding as decoding
ENCODED = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
HERE = Cluster("here", 2, 1, Link(1e6, 0), Link(1e3, 0), servers=1, cores=2, one_machine=True)


def test_cores_are_shared_where_backward_leaves_none_for_communication_and_servers() -> None:
    """Two workers that compute with a thread each and a server: on 2 cores all share them, on 3 the server has one and each worker another. A lone worker
    with all of its machine's threads shares, too; one that leaves a core does not; nor does one whose threads are not known."""
    assert sharing_of(HERE, 1) == Sharing(2, 2, 1)
    assert sharing_of(replace(HERE, cores=3), 1) is None
    alone = Cluster("apart", 2, 1, Link(1, 0), Link(1, 0), servers=1, cores=4)
    assert sharing_of(alone, 4) == Sharing(4, 1, 0)
    assert sharing_of(alone, 3) is None
    assert sharing_of(HERE, 0) is None
    assert sharing_of(replace(HERE, cores=0), 1) is None


def test_work_on_shared_cores_delays_backward_by_the_machines_work_divided_by_its_cores() -> None:
    """Two workers encode 1,000 elements for 1,000 us each on two cores: backward is 1,000 us late. Their server adds both payloads and encodes the sum in 3,000
    us: each core gives half, which delays backward by 1,500, and 1,500 more pass on the server. Each of a part's two messages takes 40 us of a core, so that
    both cores lose 40 us, and 40 more pass until the server's thread has handled both. 1,000 bytes at 8 Gbit/s keep a core at either end busy for 1 us: both
    workers' bytes take 2 x 2 us of 2 cores, and the link (2 ranks' bytes at 1,000 Gbit/s) is not held for that, too."""
    costs = CodecCosts("c", 1.0, {"cpu": PER_ELEMENT, "server": PER_ELEMENT}, carriers={"shm": CarrierCosts(40.0, 40.0, gbps=8.0)})
    found = [(task.resource, costs.task_us(task, 1000.0)) for task in tasks(ENCODED, HERE, costs, sharing=Sharing(2, 2, 1))]
    messages = [(GPU, pytest.approx(40)), (MESSAGES, pytest.approx(40)), (GPU, pytest.approx(2))]
    assert [one for one in found if one[0] >= 0] == [
        (GPU, pytest.approx(1000)),
        *messages, (SEND, pytest.approx(0.016)), (GPU, pytest.approx(1500)), (SERVER, pytest.approx(1500)),
        *messages, (RECEIVE, pytest.approx(0.016)), (GPU, pytest.approx(1000)),
    ]  # fmt: skip


def test_a_codecs_thread_takes_one_of_the_cores_that_a_lone_worker_computes_on() -> None:
    """Four cores compute; a codec takes 1,000 us on one of them: backward loses 250 us of each, and the part is late by the other
    750. The server is elsewhere."""
    apart = replace(HERE, one_machine=False, cores=4)
    costs = CodecCosts("c", 1.0, {"cpu": PER_ELEMENT, "server": PER_ELEMENT})
    found = [(task.resource, costs.task_us(task, 1000.0)) for task in tasks(ENCODED, apart, costs, sharing=Sharing(4, 1, 0)) if task.curve]
    assert found == [(GPU, 250), (CPU, 750), (SERVER, 3000), (GPU, 250), (CPU, 750)]


def test_collectives_move_bytes_on_the_cores_of_their_ranks() -> None:
    """1,000 floats of two ranks: half of 4,000 bytes is sent and half received by each: 2 x 2,000 bytes at 8 Gbit/s, 4 us of each of two cores."""
    costs = CodecCosts("none", 4.0, {}, carriers={"memory": CarrierCosts(gbps=8.0)})
    made = problem(HERE, 1, costs).tasks(("flat.reduce_scatter",), costs)
    assert (made[0].resource, costs.task_us(made[0], 1000.0)) == (GPU, pytest.approx(4))


def problem(cluster: Cluster, threads: int, costs: CodecCosts | None = None) -> Problem:
    tensors = tuple(TensorProfile(f"t{index}", 1000, 100.0 * index) for index in range(4))
    curves = {"cpu": PER_ELEMENT, "server": PER_ELEMENT}
    profile = Profile(
        "m", tensors, codecs={"int8": curves}, device="cpu", compute_threads=threads, carriers={"shm": CarrierCosts(40.0, 40.0, gbps=8.0)}
    )
    return Problem(profile, cluster, costs or codec_costs("int8", profile, 2), Constraints(servers=True, runtime=True))


def test_a_step_on_shared_cores_takes_longer_and_the_search_and_its_bound_know_it() -> None:
    buckets = [PlannedBucket((f"t{index}",), 1000, 1, -index, "int8", ENCODED) for index in range(4)]
    alone, shared = problem(replace(HERE, cores=8), 1), problem(HERE, 1)
    assert simulate(alone, buckets).timeline.computed_us[-1] == 300.0
    assert simulate(shared, buckets).timeline.computed_us[-1] > 300.0
    found = search(shared)
    simulated = simulate(shared, found.buckets)
    assert found.step_us == pytest.approx(simulated.step_us)
    assert define_timeline(simulated.chains).step_us == simulated.step_us
    bounds = lower_bounds(shared, found.buckets, found.step_us)
    assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)


def test_a_clusters_file_says_that_all_processes_are_on_one_machine(tmp_path: Path) -> None:
    cluster = replace(HERE, over_tcp=True, source="s")
    (tmp_path / "c.toml").write_text(cluster.to_toml())
    assert load_cluster(str(tmp_path / "c.toml")) == cluster
    with pytest.raises(UsageError, match="c: field over_tcp: machines reach each other over TCP anyway"):
        read_cluster({**replace(cluster, one_machine=False).to_json(), "over_tcp": True}, "c", "c")


def test_workers_of_one_machine_divide_its_cores_for_their_threads() -> None:
    assert replace(HERE, cores=8).threads_of_a_worker == 4
    assert replace(HERE, cores=8, one_machine=False).threads_of_a_worker == 4
    assert replace(HERE, cores=4).threads_of_a_worker == 2
