"""What carriers cost beside their links: each line by hand, and in every form that a profile says it in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.passes import PAYLOADS, line_through, server_curve
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, load_profile, read_profile
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.search import search
from psgc.plan.model.collectives import BETWEEN_GPUS, IN_HOSTS_MEMORY, LIBRARY, RINGS
from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, IN_FLIGHT, INTRA, MESSAGES, RECEIVE, SEND, SERVER, CodecCosts, tasks
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.timeline import define_timeline

TWO = Cluster("two", 2, 1, Link(1e6, 0), Link(1e6, 0), servers=1)
FLAT = ("flat.reduce_scatter", "flat.all_gather")
SERVED = ("flat.push", "flat.pull")


def priced(option: Option, cluster: Cluster, numel: float, collectives: Any = IN_HOSTS_MEMORY, **carriers: CarrierCosts) -> list[Any]:
    """The resource and microseconds of each task of a part of ``numel`` floats."""
    costs = CodecCosts("none", 4.0, {}, carriers=carriers)
    return [(task.resource, pytest.approx(costs.task_us(task, numel), abs=0.1)) for task in tasks(option, cluster, costs, collectives)]


def test_a_collective_keeps_its_threads_busy_for_each_us_and_a_lone_one_is_late_by_the_rest_of_lone_us() -> None:
    """sockets, 700 us alone and 500 of them busy: 500 on the threads that handle messages, and 200 in flight, for each of the two collectives."""
    sockets = CarrierCosts(lone_us=700.0, each_us=500.0)
    assert priced(FLAT, TWO, 1.0, sockets=sockets) == 2 * [(MESSAGES, 500.0), (BOTH_WAYS, 0.0), (IN_FLIGHT, 200.0)]


def test_each_further_member_of_a_group_adds_peer_us() -> None:
    """Five members: three beyond the second, 20 us each: 560 us busy, and 760 alone."""
    sockets = CarrierCosts(lone_us=700.0, each_us=500.0, peer_us=20.0)
    five = replace(TWO, nodes=5)
    assert priced(FLAT[:1], five, 1.0, sockets=sockets) == [(MESSAGES, 560.0), (BOTH_WAYS, 0.0), (IN_FLIGHT, 200.0)]


def test_no_carrier_moves_bytes_faster_than_its_own_rate() -> None:
    """1 M floats on two nodes: 2 MB through a rank's link for each collective, at sockets' 8 Gbit/s 2 ms over a link of 100, and 16 ms over a link of 1
    Gbit/s. To a server, over TCP at 16 Gbit/s: 4 MB, and the server takes both ranks' 8 MB: 4 ms."""
    fast, slow = replace(TWO, inter=Link(100, 0)), replace(TWO, inter=Link(1, 0))
    sockets, tcp = CarrierCosts(gbps=8.0), CarrierCosts(gbps=16.0)
    assert priced(FLAT[:1], fast, 1e6, sockets=sockets) == [(BOTH_WAYS, 2_000.0)]
    assert priced(FLAT[:1], slow, 1e6, sockets=sockets) == [(BOTH_WAYS, 16_000.0)]
    assert priced(SERVED, fast, 1e6, tcp=tcp) == [(SEND, 4_000.0), (RECEIVE, 4_000.0)]


def test_within_a_node_and_between_nodes_each_level_pays_its_own_carrier() -> None:
    """Two nodes of two ranks: memory within, sockets between; a flat collective over both is sockets'."""
    nodes = Cluster("n", 2, 2, Link(1e6, 0), Link(1e6, 0))
    found = priced(
        ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"), nodes, 1.0, memory=CarrierCosts(30.0, 30.0), sockets=CarrierCosts(500.0, 500.0)
    )  # fmt: skip
    assert found == [(MESSAGES, 30.0), (INTRA, 0.0), (MESSAGES, 500.0), (BOTH_WAYS, 0.0), (MESSAGES, 30.0), (INTRA, 0.0)]
    flat = priced(FLAT[:1], nodes, 1.0, memory=CarrierCosts(30.0, 30.0), sockets=CarrierCosts(500.0, 500.0), nccl=CarrierCosts(9.0, 9.0))
    assert flat == [(MESSAGES, 520.0 - 20.0), (ALL_LINKS, 0.0)]


def test_gpus_pay_nccls_costs_and_a_librarys_rings_none() -> None:
    costs = {"sockets": CarrierCosts(500.0, 500.0), "memory": CarrierCosts(30.0, 30.0), "nccl": CarrierCosts(15.0, 15.0)}
    assert priced(FLAT[:1], TWO, 1.0, BETWEEN_GPUS, **costs) == [(MESSAGES, 15.0), (BOTH_WAYS, 0.0)]
    assert priced(FLAT[:1], TWO, 1.0, RINGS, **costs) == [(BOTH_WAYS, 0.0)]


def test_on_one_machine_everything_passes_its_memory_unless_it_goes_over_tcp() -> None:
    costs = {name: CarrierCosts(us, us) for name, us in (("tcp", 60.0), ("shm", 20.0), ("sockets", 500.0), ("memory", 200.0))}
    here = replace(TWO, one_machine=True)
    assert priced(SERVED[:1], here, 1.0, **costs)[0] == (MESSAGES, 40.0), "a server handles both ranks' messages"
    assert priced(FLAT[:1], here, 1.0, **costs)[0] == (MESSAGES, 200.0)
    over_tcp = replace(here, over_tcp=True)
    assert priced(SERVED[:1], over_tcp, 1.0, **costs)[0] == (MESSAGES, 120.0)
    assert priced(FLAT[:1], over_tcp, 1.0, **costs)[0] == (MESSAGES, 500.0)


def test_a_small_all_reduce_of_a_library_is_a_tree_and_a_large_one_a_ring() -> None:
    """1,024 nodes of 8 GPUs, 20 us between nodes and 6 within one. Between nodes alone a ring waits for 2 x 1,023 messages, 40.9 ms, a tree for 2 x 10:
    400 us. Over all GPUs the ranks of a node are a chain of 7 messages, up and down: 400 + 84 us. At 100 Gbit/s a byte takes 0.08 ns: a ring moves 8 x 1023 /
    1024 bytes of a float, a tree 8. Both take as long where the tree's further bytes, 1 / 128 of one a float, take the 40.5 ms of latency that it saves."""
    large = Cluster("large", 1024, 8, Link(1e6, 6), Link(100, 20))
    costs = CodecCosts("none", 4.0, {})
    (between,) = tasks(("inter.all_reduce",), large, costs, LIBRARY)
    (flat,) = tasks(("flat.all_reduce",), large, costs, LIBRARY)
    assert costs.task_us(between, 0.0) == pytest.approx(400)
    assert costs.task_us(flat, 0.0) == pytest.approx(484)
    numel = 1e6  # of which each of a node's 8 ranks sends its own
    assert costs.task_us(between, numel) == pytest.approx(400 + 8 * 8 * numel * 8e-5)
    alike = (2 * 1023 * 20 - 400) / (8 / 128 * 8e-5)
    for share in (0.5, 1.0, 2.0):
        tree, ring = 400 + share * alike * 64 * 8e-5, 2 * 1023 * 20 + share * alike * 64 * 1023 / 1024 * 8e-5
        assert costs.task_us(between, share * alike) == pytest.approx(min(tree, ring))
    two = replace(large, nodes=2)
    assert tasks(("inter.all_reduce",), two, costs, LIBRARY)[0].fixed_us == 40, "of two nodes a ring is as short"


def test_a_jobs_own_all_reduce_and_a_published_one_are_no_trees() -> None:
    large = Cluster("large", 1024, 1, Link(1e6, 6), Link(100, 20))
    costs = CodecCosts("none", 4.0, {})
    for collectives in (IN_HOSTS_MEMORY, BETWEEN_GPUS, RINGS):
        assert costs.task_us(tasks(("flat.all_reduce",), large, costs, collectives)[0], 0.0) >= 1023 * 20


def test_a_servers_pass_takes_what_was_measured_for_so_many_payloads() -> None:
    """Measured over 1, 2, 4 and 8 payloads of 1,000 elements: 10, 16, 20 and 36 us, the sum 4. Of 3 payloads 18, between 2 and 4; of 16 each of the 8 more a
    eighth of 36 - 4: 68. Without passes each payload takes 5 us and the sum 4."""
    passes = tuple((count, (us, 10 * us)) for count, us in ((1, 10.0), (2, 16.0), (4, 20.0), (8, 36.0)))
    curve = CostCurve((1e3, 1e4), (4.0, 40.0), (5.0, 50.0), passes)
    measured = CodecCosts("c", 1.0, {"cpu": curve, "server": curve})
    plain = replace(measured, curves={"cpu": curve, "server": replace(curve, passes=())})
    for ranks, us, without in ((1, 10, 9), (2, 16, 14), (3, 18, 19), (4, 20, 24), (8, 36, 44), (16, 68, 84)):
        cluster = replace(TWO, nodes=ranks)
        of_server = [
            [costs.task_us(task, 1e3) for task in tasks(("comp@cpu", "flat.push.c"), cluster, costs) if task.resource == SERVER]
            for costs in (measured, plain)
        ]
        assert of_server == [[pytest.approx(us)], [pytest.approx(without)]]


def test_a_profile_keeps_carriers_and_passes_and_an_older_ones_fixed_times_are_read_as_carriers(tmp_path: Path) -> None:
    passes = ((1, (3.0, 30.0)), (2, (5.0, 50.0)))
    server = CostCurve((1e3, 1e4), (1.0, 10.0), (2.0, 20.0), passes)
    carriers = {"tcp": CarrierCosts(100.0, 30.0, gbps=12.5), "sockets": CarrierCosts(590.0, 500.0, 20.0)}
    profile = Profile("m", (TensorProfile("t", 10, 0.0),), codecs={"none": {"server": server}}, carriers=carriers, compute_threads=2)
    (tmp_path / "p.json").write_text(json.dumps(profile.to_json()))
    found = load_profile(str(tmp_path / "p.json"))
    assert (found.carriers, found.codecs, found.compute_threads) == (carriers, profile.codecs, 2)
    older = replace(
        profile, carriers={}, overheads={"part_us": 200.0, "next_part_us": 60.0, "collective_us": 590.0, "collective_within_us": 280.0}
    )
    assert older.all_carriers == {
        "tcp": CarrierCosts(100.0, 30.0), "shm": CarrierCosts(100.0, 30.0), "sockets": CarrierCosts(590.0, 590.0), "memory": CarrierCosts(280.0, 280.0)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"carriers": {"pigeon": {}}}, "carriers: unknown carrier 'pigeon'; expected some of tcp, shm, sockets, memory, nccl"),
        ({"carriers": {"tcp": {"loan_us": 1}}}, "carriers.tcp: unknown field 'loan_us'"),
        ({"carriers": {"tcp": {"gbps": 0}}}, "carriers.tcp.gbps is 0, expected a number above 0"),
        ({"carriers": {"tcp": {"lone_us": -1}}}, "carriers.tcp.lone_us is -1, expected a number of at least 0"),
        ({"carriers": []}, "carriers: expected an object"),
        ({"compute_threads": -1}, "compute_threads is -1, expected a whole number"),
        ({"codecs": {"none": {"server": {"numel": [1], "encode_us": [1], "decode_us": [1], "passes_us": {"0": [1]}}}}}, "passes_us: '0'"),
        (
            {"codecs": {"none": {"server": {"numel": [1], "encode_us": [1], "decode_us": [1], "passes_us": {"2": [1, 2]}}}}},
            "passes_us: '2'",
        ),
    ],
)
def test_a_wrong_table_of_costs_is_named(change: dict[str, Any], said: str) -> None:
    document = {"version": 1, "tensors": [{"name": "t", "numel": 1, "ready_us": 0}], **change}
    with pytest.raises(UsageError) as error:
        read_profile(document, "p.json")
    assert said in str(error.value)


def test_the_search_prices_trees_carriers_and_passes_as_the_reference_does_and_its_bound_holds() -> None:
    passes = tuple((count, (10.0 * count**0.7, 1e4 * count**0.7)) for count in (1, 2, 3, 4, 8))
    curve, server = CostCurve((1e3, 1e6), (10.0, 1e3), (10.0, 1e3)), CostCurve((1e3, 1e6), (1.0, 1e3), (9.0, 9e3), passes)
    tensors = tuple(TensorProfile(f"t{index}", 40_000, 400.0 * index) for index in range(6))
    carriers = {name: CarrierCosts(200.0, 60.0, 5.0, 20.0) for name in ("tcp", "shm", "sockets", "memory")}
    library = Problem(
        Profile("m", tensors, codecs={"int8": {"cpu": curve, "gpu": curve, "server": server}}),
        Cluster("c", 16, 2, Link(100, 5), Link(10, 40)),
        codec_costs("int8", Profile("m", tensors, codecs={"int8": {"cpu": curve, "gpu": curve, "server": server}}), 32),
        by_library=True,
    )
    profile = Profile("m", tensors, codecs={"int8": {"cpu": curve, "server": server}}, device="cpu", carriers=carriers)
    job = Problem(
        profile, Cluster("c", 3, 2, Link(100, 5), Link(10, 40), servers=2), codec_costs("int8", profile, 6), Constraints(servers=True, runtime=True)
    )  # fmt: skip
    for problem in (library, job):
        found = search(problem)
        simulated = simulate(problem, found.buckets)
        assert found.step_us == pytest.approx(simulated.step_us)
        assert define_timeline(simulated.chains).step_us == simulated.step_us
        bounds = lower_bounds(problem, found.buckets, found.step_us)
        assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)
    trees = [PlannedBucket(tuple(f"t{index}" for index in range(6)), 240_000, 1, 0, "none", ("flat.all_reduce",))]
    assert simulate(library, trees).step_us == pytest.approx(2_000 + 2 * (4 * 40 + 5) + 8 * 240_000 * 8e-4), "a tree of 16 nodes"


def test_a_line_through_passes_has_no_negative_part_and_lies_between_them() -> None:
    """10 us a payload and 5 for the sum give both; a pass over many that is quicker than one has payloads that add nothing; the sum is no less than nothing."""
    assert line_through({count: 10.0 * count + 5 for count in PAYLOADS}) == pytest.approx((5.0, 10.0))
    finish, add = line_through({1: 9.0, 2: 8.0, 4: 7.0})
    assert add == 0.0 and 7 < finish < 9
    assert line_through({1: 1.0, 2: 4.0, 4: 16.0}) == (0.0, pytest.approx(1.5, rel=0.3))
    assert line_through({4: 12.0}) == (0.0, 3.0)
    curve = server_curve((1e3, 1e4), [{1: 15.0, 2: 25.0}, {1: 150.0, 2: 250.0}])
    assert (curve.encode_us, curve.decode_us, curve.sum_us(2)) == ((5.0, 50.0), (10.0, 100.0), (25.0, 250.0))
