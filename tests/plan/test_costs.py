"""What options cost: by hand for a few, and laws for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.collectives import BETWEEN_GPUS, IN_HOSTS_MEMORY, RINGS
from psgc.plan.model.costs import (
    ALL_LINKS,
    BOTH_WAYS,
    CPU,
    GPU,
    IN_FLIGHT,
    INTRA,
    RECEIVE,
    SEND,
    SERVER,
    CodecCosts,
    Held,
    Task,
    resources_of,
    tasks,
    walk,
)
from psgc.plan.model.options import Option, all_options, server_options
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import chains_of, run
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.program.steps import Exchange, Raw, Serve, Transfer

# a byte takes 1 us within a node and 10 us between nodes
CLUSTER = Cluster("c", nodes=4, gpus_per_node=2, intra=Link(8e-3, 1.0), inter=Link(8e-4, 100.0), servers=2)
PAYLOAD = 0.5  # bytes an element
CODEC = CodecCosts("half", PAYLOAD, {"gpu": CostCurve((1.0, 2.0), (3.0, 6.0), (1.0, 2.0))})


def by_action(*option: str) -> dict[str, Task]:
    """Of each action the first task: a link's, not what is in flight after it."""
    return {task.action: task for task in reversed(tasks(option, CLUSTER, CODEC))}


def test_a_ring_passes_each_nodes_link_once() -> None:
    (task,) = tasks(("flat.all_reduce",), CLUSTER, CODEC)
    assert (task.resource, task.fixed_us) == (ALL_LINKS, 14 * 100)
    assert task.per_element_us == pytest.approx(2 * 7 / 8 * 4 * 10)


def test_hierarchy_shares_the_nodes_link_among_its_ranks() -> None:
    found = by_action("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    assert found["intra.reduce_scatter"] == Task("intra.reduce_scatter", INTRA, 1.0, pytest.approx(4 / 2))
    assert found["inter.all_reduce"].per_element_us == pytest.approx(2 * (2 * 3 / 4 * 2 * 10))  # two ranks with half the elements each
    assert found["intra.all_gather"].per_element_us == pytest.approx(4 / 2)


def test_a_root_alone_sends_for_its_node() -> None:
    found = by_action("intra.reduce", "inter.all_reduce", "intra.broadcast")
    assert found["inter.all_reduce"].per_element_us == pytest.approx(2 * 3 / 4 * 4 * 10)
    assert found["intra.broadcast"].per_element_us == pytest.approx(4)


def test_gathered_payloads_are_decoded_piece_by_piece() -> None:
    found = by_action("comp@gpu", "flat.all_gather.c", "decomp@gpu")
    assert found["flat.all_gather.c"].per_element_us == pytest.approx(7 * PAYLOAD * 10)
    assert (found["decomp@gpu"].share, found["decomp@gpu"].times) == (1.0, 8.0)
    assert CODEC.task_us(found["comp@gpu"], 2.0) == 6.0
    assert CODEC.task_us(found["decomp@gpu"], 2.0) == 16.0  # 8 payloads of 2 elements


def test_all_to_all_deals_out_pieces_of_shards() -> None:
    option = ("comp@cpu", "flat.all_to_all.c", "decomp@gpu", "comp@gpu", "flat.all_gather.c", "decomp@gpu")
    made = [task for task in tasks(option, CLUSTER, CODEC) if task.resource != IN_FLIGHT]
    assert [(task.share, task.times) for task in made if task.curve] == [
        (1.0, 2.0),
        (1 / 8, 8.0),
        (1 / 8, 1.0),
        (1.0, 1.0),
    ]  # the CPU is two ranks'
    assert made[1].per_element_us == pytest.approx(7 / 8 * PAYLOAD * 10 * 2 * 6 / 7)  # two ranks' bytes, but for what stays in the node
    assert made[4].per_element_us == pytest.approx(7 / 8 * PAYLOAD * 10)
    assert [task.resource for task in made if task.curve] == [CPU, GPU, GPU, GPU]


def test_of_a_pair_the_first_encoding_is_by_the_push_codec_and_later_ones_are_by_the_pull_codec() -> None:
    option = ("comp@gpu", "flat.all_to_all.c", "decomp@gpu", "comp@gpu", "flat.all_gather.c", "decomp@gpu")
    slower = {"gpu": CostCurve((1.0, 2.0), (30.0, 60.0), (10.0, 20.0))}
    pair = replace(CODEC, pull_bytes_per_element=2.0, pull_curves=slower)
    made = [task for task in tasks(option, CLUSTER, pair) if task.resource != IN_FLIGHT]
    alike = [task for task in tasks(option, CLUSTER, CODEC) if task.resource != IN_FLIGHT]
    assert [pair.task_us(task, 16.0) for task in made if task.curve] == pytest.approx([48, 16, 60, 160])
    assert [CODEC.task_us(task, 16.0) for task in alike if task.curve] == pytest.approx([48, 16, 6, 16])
    assert made[1].per_element_us == pytest.approx(7 / 8 * PAYLOAD * 10 * 2 * 6 / 7)
    assert made[4].per_element_us == pytest.approx(7 / 8 * 2.0 * 10)
    over_servers = tasks(("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu"), CLUSTER, pair)
    assert [pair.task_us(task, 16.0) for task in over_servers if task.resource == GPU] == pytest.approx([48, 160]), (
        "the answer is the pull codec's"
    )
    floats_last = ("intra.reduce_scatter", "comp@gpu", "inter.push.c", "inter.pull.c", "intra.all_gather.c", "decomp@gpu")
    gathered = next(task for task in tasks(floats_last, CLUSTER, pair) if task.action == "intra.all_gather.c")
    assert gathered.per_element_us == pytest.approx(1 / 2 * 2.0), "answers that are passed on within the node"


def test_of_a_flat_gather_the_roots_link_carries_what_comes_from_other_nodes() -> None:
    found = by_action("comp@gpu", "flat.gather.c", "flat.broadcast.c", "decomp@gpu")
    assert found["flat.gather.c"].per_element_us == pytest.approx(6 * PAYLOAD * 10)
    assert found["flat.broadcast.c"].per_element_us == pytest.approx(8 * PAYLOAD * 10)  # all 8 payloads


def test_servers_links_can_be_the_narrow_ones() -> None:
    found = by_action("flat.push", "flat.pull")
    assert found["flat.push"] == Task("flat.push", SEND, 0.0, pytest.approx(4 * 10 * 2 * 4 / 2))  # 8 ranks into 2 servers
    assert found["flat.pull"].resource == RECEIVE
    assert by_action("intra.reduce", "inter.push", "inter.pull", "intra.broadcast")["inter.push"].per_element_us == pytest.approx(
        4 * 10 * 2
    )


@pytest.mark.parametrize("options", [all_options(), server_options()])
def test_every_option_ends_with_all_elements_decoded_everywhere(options: tuple[Option, ...]) -> None:
    for option in options:
        atoms, held = walk(option)
        assert held == Held(), option
        assert [atom.action for atom in atoms] == list(option)
        made = tasks(option, CLUSTER, CODEC)
        assert list(dict.fromkeys(task.action for task in made)) == list(dict.fromkeys(option))
        assert all(task.fixed_us >= 0 and task.per_element_us >= 0 and 0 < task.share <= 1 and task.times >= 1 for task in made)


def test_groups_of_one_have_nothing_to_do() -> None:
    single = Cluster("s", nodes=1, gpus_per_node=1, intra=Link(1, 1), inter=Link(1, 1))
    assert tasks(("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"), single, CODEC) == ()


def test_a_device_without_times_is_named() -> None:
    (encode, *_) = tasks(("comp@cpu", "flat.all_gather.c", "decomp@gpu"), CLUSTER, CODEC)
    with pytest.raises(UsageError, match="codec half: the profile has no times for it on cpu"):
        CODEC.task_us(encode, 100.0)


def test_a_server_adds_every_payload_and_finishes_its_share() -> None:
    option = ("intra.reduce_scatter", "comp@gpu", "inter.push.c", "inter.pull.c", "decomp@gpu", "intra.all_gather")
    made = [task for task in tasks(option, CLUSTER, CODEC) if task.resource == SERVER]
    assert [(task.curve, task.share, task.times) for task in made] == [("server.sum:4", 1 / 2, 1.0)]


def test_answers_may_be_of_another_size_than_pushes() -> None:
    answers = CodecCosts("half/float", PAYLOAD, CODEC.curves, pull_bytes_per_element=4.0)
    found = {
        task.action: task
        for task in tasks(("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu"), CLUSTER, answers)
        if not task.curve and task.resource != IN_FLIGHT
    }
    assert found["flat.pull.c"].per_element_us == pytest.approx(8 * found["flat.push.c"].per_element_us)


def test_what_is_not_encoded_is_copied_where_the_profile_has_times_for_it() -> None:
    raw = CodecCosts("half", PAYLOAD, {}, raw={"cpu": CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))})
    made = tasks(("flat.push", "flat.pull"), CLUSTER, raw)
    assert [task.resource for task in made if task.resource != IN_FLIGHT] == [CPU, SEND, SERVER, RECEIVE, CPU]
    passes = [raw.task_us(task, 10.0) for task in made if task.curve == "raw:server.sum:8"]
    assert (
        passes == [pytest.approx(10 / 2 * 9)] * 2
    )  # eight payloads and the sum: the server's share of all parts, and the rest of this one


def test_without_times_of_the_workers_own_copies_no_copies_are_counted() -> None:
    alone = CodecCosts("half", PAYLOAD, CODEC.curves, raw={"server": CostCurve((1.0,), (1.0,), (1.0,))})
    assert tasks(("flat.push", "flat.pull"), CLUSTER, alone) == tasks(("flat.push", "flat.pull"), CLUSTER, CODEC)


def took_us(option: Option, cluster: Cluster, numel: float, codec: CodecCosts = CODEC) -> float:
    """Microseconds of one part alone."""
    return sum(codec.task_us(task, numel) for task in tasks(option, cluster, codec))


def test_a_flat_ring_is_as_slow_as_the_links_within_nodes_where_those_are_the_slower() -> None:
    """8 nodes of 8, 100 Gbit/s within and 400 between, no latency: a ring of 64 passes 2 * 63 / 64 of 100 MB over each rank's link, which
    takes 1.96875 * 100e6 * 8 / 100e9 s = 15.75 ms; over the links between nodes alone it would be a quarter, 3.94 ms."""
    slow = Cluster("s", 8, 8, Link(100, 0), Link(400, 0))
    assert took_us(("flat.all_reduce",), slow, 25e6) == pytest.approx(15_750)
    assert took_us(("flat.all_reduce",), Cluster("f", 8, 8, Link(400, 0), Link(100, 0)), 25e6) == pytest.approx(15_750)
    assert took_us(("flat.all_reduce",), Cluster("f", 8, 8, Link(400, 0), Link(400, 0)), 25e6) == pytest.approx(3_937.5)
    (task,) = tasks(("flat.all_reduce",), slow, CODEC)
    assert resources_of(task.resource) == (INTRA, SEND, RECEIVE)


def test_of_a_flat_all_to_all_what_stays_within_a_node_passes_its_links() -> None:
    """2 nodes of 4, 1 byte an element for easy sums: each rank sends 3 / 8 to its node's ranks and 4 / 8 away; a node's 4 ranks send 4 * 4 / 8
    bytes an element away. At 8 Gbit/s a byte takes 1 ns: within 0.375 ns, between 2 ns an element. With links between 100 times as fast it is
    0.02 ns, and those within are the slower: 0.375 ns."""
    byte = CodecCosts("byte", 1.0, CODEC.curves)
    option = ("comp@gpu", "flat.all_to_all.c", "decomp@gpu", "flat.all_gather")
    for between, us in ((8.0, 2e-3), (800.0, 0.375e-3)):
        found = [
            task for task in tasks(option, Cluster("c", 2, 4, Link(8, 0), Link(between, 0)), byte) if task.action == "flat.all_to_all.c"
        ]
        assert [task.per_element_us for task in found] == [pytest.approx(us)]


def test_a_part_lies_on_one_server_and_parts_on_all_of_them() -> None:
    """4 nodes of one rank, 4 servers at 10 Gbit/s, 8 MB: one part's bytes from all nodes pass one server's link, 4 * 8e6 * 8 / 10e9 s =
    25.6 ms, not the 6.4 ms that a node's link takes. Four parts go to four servers: each link carries 4 * 2 MB, 6.4 ms in all, and the last
    part is late by the rest of its own 6.4 ms, 4.8: 11.2 ms."""
    cluster = Cluster("c", 4, 1, Link(100, 0), Link(10, 0), servers=4)
    assert took_us(("flat.push",), cluster, 2e6) == pytest.approx(25_600)
    part = [(task.resource, CODEC.task_us(task, 5e5)) for task in tasks(("flat.push",), cluster, CODEC)]
    assert part == [(SEND, pytest.approx(1_600)), (IN_FLIGHT, pytest.approx(4_800))]
    assert run(chains_of([0.0] * 4, [part] * 4)).step_us == pytest.approx(4 * 1_600 + 4_800)


def test_the_shards_of_a_part_lie_on_several_servers() -> None:
    """2 nodes of 2 ranks, each of which pushes its half of 4 MB: the halves are on 2 servers of 4. A half's server gets 2 * 2 MB, at 8 Gbit/s
    4 ms; a node's link carries 2 * 2 MB, 4 ms, too: nothing is late."""
    cluster = Cluster("c", 2, 2, Link(1e6, 0), Link(8, 0), servers=4)
    option = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    found = [(task.resource, CODEC.task_us(task, 1e6)) for task in tasks(option, cluster, CODEC) if task.action == "inter.push"]
    assert found == [(SEND, pytest.approx(4_000))]


def test_a_servers_pass_over_a_lone_part_takes_all_of_its_time() -> None:
    """A payload of 1000 elements takes a server 1 us an element, of 4 ranks 4000 us, and 1 us an element to finish: 5000 us. Of that the 2
    servers' common time is half; a lone part waits for the rest, too."""
    served = CodecCosts("served", 1.0, {"server": CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))})
    made = tasks(("comp@gpu", "flat.push.c"), Cluster("c", 4, 1, Link(1, 0), Link(1e6, 0), servers=2), served)
    by_resource = {
        resource: sum(served.task_us(t, 1000.0) for t in made if t.resource == resource and t.curve) for resource in (SERVER, IN_FLIGHT)
    }
    assert by_resource == {SERVER: pytest.approx(2_500), IN_FLIGHT: pytest.approx(2_500)}


def test_servers_on_the_workers_nodes_use_the_nodes_links() -> None:
    """2 nodes of one rank and a server each, 8 Gbit/s, a part of 4 MB: half of what a node pushes is for the other's server and half of what
    its own server gets comes from the other. So each direction carries 2 MB for the push as for the pull, and both are held: 2 ms each. A lone
    part is on one node, which gets 4 MB from the other: 2 ms later."""
    apart = Cluster("c", 2, 1, Link(1e6, 0), Link(8, 0), servers=2)
    beside = replace(apart, servers_on_nodes=True)
    found = [(task.resource, CODEC.task_us(task, 1e6)) for task in tasks(("flat.push",), beside, CODEC)]
    assert found == [(BOTH_WAYS, pytest.approx(2_000)), (IN_FLIGHT, pytest.approx(2_000))]
    assert [task.resource for task in tasks(("flat.push", "flat.pull"), apart, CODEC)] == [SEND, IN_FLIGHT, RECEIVE, IN_FLIGHT]
    # all servers on the first of the nodes' links: 4 nodes, 1 server: 3 nodes' 4 MB come, 12 ms, as a worker's own link would carry 4
    one = Cluster("c", 4, 1, Link(1e6, 0), Link(8, 0), servers=1, servers_on_nodes=True)
    assert took_us(("flat.push",), one, 1e6) == pytest.approx(12_000)


def test_a_latency_delays_a_push_and_does_not_hold_the_link() -> None:
    """51 parts of 0.5 MB from each of 2 workers at 8 Gbit/s and 20 ms: the server's link is busy for 51 ms, and the last part comes 20 ms later:
    71 ms, not 51 * 21."""
    cluster = Cluster("c", 2, 1, Link(8, 0), Link(8, 20_000), servers=1)
    part = [(task.resource, CODEC.task_us(task, 125_000.0)) for task in tasks(("flat.push",), cluster, CODEC)]
    assert part == [(SEND, pytest.approx(1_000)), (IN_FLIGHT, pytest.approx(20_000))]
    assert run(chains_of([0.0] * 51, [part] * 51)).step_us == pytest.approx(51_000 + 20_000)
    (ring,) = tasks(("flat.all_reduce",), cluster, CODEC)  # two messages in a row, as of a collective of NCCL's, one after the other
    part = [(ring.resource, CODEC.task_us(ring, 125_000.0))]
    assert run(chains_of([0.0] * 51, [part] * 51)).step_us == pytest.approx(51 * (500 + 2 * 20_000))


def test_direct_collectives_send_each_slice_over_the_link_to_the_rank_that_it_is_for() -> None:
    """2 nodes of 2 ranks, 80 Mbit/s between them, where a byte takes 0.1 us, 4 bytes an element. Each rank sends a quarter of the gradient to each of 2
    ranks of the other node: a node's two ranks send 4 quarters, 0.4 us an element, where a ring passes 3 / 4 of it over a node's link, 0.3 us. Payloads
    of half a byte: 2 ranks send theirs to 2 others, 4 payloads, 0.2 us an element, where a ring passes 3, 0.15 us."""
    cluster = Cluster("c", 2, 2, Link(1e6, 0), Link(0.08, 0))
    gathered = ("comp@cpu", "flat.all_gather.c", "decomp@cpu")
    for collectives, plain_us, encoded_us in ((IN_HOSTS_MEMORY, 0.4, 0.2), (RINGS, 0.3, 0.15)):
        plain = [task.per_element_us for task in tasks(("flat.reduce_scatter", "flat.all_gather"), cluster, CODEC, collectives)]
        assert plain == [pytest.approx(plain_us)] * 2
        (encoded,) = (task for task in tasks(gathered, cluster, CODEC, collectives) if not task.curve)
        assert encoded.per_element_us == pytest.approx(encoded_us)
    slow = Cluster(
        "s", 2, 2, Link(0.004, 0), Link(0.08, 0)
    )  # within a node a byte takes 2 us: a rank sends a quarter to its node's other one
    assert tasks(("flat.reduce_scatter", "flat.all_gather"), slow, CODEC, IN_HOSTS_MEMORY)[0].per_element_us == pytest.approx(2 * 4 / 4)


def test_between_gpus_slices_go_straight_to_the_rank_that_sums_them_and_the_library_gathers_them_around_a_ring() -> None:
    """As above: 0.4 us an element for the reduce_scatter, 0.3 us for the all_gather, and both for an all_reduce. A reduce ends with a gather: the two ranks
    of the other node send a quarter each, 0.2 us. Within a node of 2, at 2 us a byte, a reduce_scatter is half of the 4 bytes there and back, and a gather
    the other half."""
    cluster = Cluster("c", 2, 2, Link(1e6, 0), Link(0.08, 0), collectives="nccl")
    found = {
        each: tasks((each,), cluster, CODEC, BETWEEN_GPUS)[0].per_element_us
        for each in ("flat.reduce_scatter", "flat.all_reduce", "flat.reduce")
    }
    assert found == pytest.approx({"flat.reduce_scatter": 0.4, "flat.all_reduce": 0.7, "flat.reduce": 0.6})
    slow = Cluster("s", 2, 2, Link(0.004, 0), Link(80, 0), collectives="nccl")
    reduced = tasks(("intra.reduce", "inter.all_reduce", "intra.broadcast"), slow, CODEC, BETWEEN_GPUS)
    assert [task.per_element_us for task in reduced if task.resource == INTRA] == pytest.approx([8.0, 8.0])


def test_a_cluster_says_by_what_collectives_its_jobs_are_planned() -> None:
    for device, named, expected in (
        ("cpu", "", IN_HOSTS_MEMORY), ("cuda", "", RINGS), ("cuda", "host", IN_HOSTS_MEMORY), ("cuda", "nccl", BETWEEN_GPUS)
    ):  # fmt: skip
        cluster = Cluster("c", 2, 2, Link(10, 1), Link(1, 1), collectives=named)
        job = Profile("job", (TensorProfile("w", 4096, 10.0),), device=device)
        assert Problem(job, cluster, CODEC).collectives is expected


@pytest.mark.parametrize(("nodes", "of_each"), [(2, 2), (2, 3), (3, 2), (4, 1)])
def test_what_is_taken_to_leave_a_node_is_what_programs_send(nodes: int, of_each: int) -> None:
    """Of all options whose messages all go to the rank that they are for; a byte takes a microsecond on the link, and an element of a payload is half a
    byte."""
    ranks, cluster, numel = Ranks((of_each,) * nodes), Cluster("c", nodes, of_each, Link(1e9, 0), Link(8e-3, 0)), 12 * 4096
    straight = [
        option
        for option in all_options(("cpu",))
        if {action.split(".")[1] for action in option if "@" not in action} <= {"reduce_scatter", "all_gather", "all_to_all"}
    ]
    assert len(straight) > 20
    for option in straight:
        sent = [0.0] * nodes
        for rank, program in enumerate(compile_option(option, numel, ranks, 0)):
            for one in (one for transfer in program.transfers for one in transfer.collectives):
                away = [index for index, member in enumerate(one.members) if ranks.node_of[member] != ranks.node_of[rank]]
                if isinstance(one, Exchange):
                    nbytes = PAYLOAD * sum((p.range[1] - p.range[0]) * p.payloads for index in away for p in one.sends[index])
                else:
                    own = one.members.index(rank)
                    slices = away if one.op == "reduce_scatter" else [own] * len(away)
                    nbytes = 4.0 * sum(one.cuts[index + 1] - one.cuts[index] for index in slices)
                sent[ranks.node_of[rank]] += nbytes
        modelled = sum(
            task.per_element_us for task in tasks(option, cluster, CODEC, IN_HOSTS_MEMORY) if SEND in resources_of(task.resource)
        )
        assert modelled * numel == pytest.approx(max(sent), rel=1e-6), option


def _most_within_a_node(option: Option, action: int, ranks: Ranks, numel: int) -> float:
    """Elements that the rank with the most sends or receives in an action's collectives of floats: each slice goes directly to its rank."""
    sent, received = [0] * ranks.size, [0] * ranks.size
    for rank, program in enumerate(compile_option(option, numel, ranks)):
        for step in program.steps:
            if isinstance(step, Transfer) and step.action == action:
                for raw in step.collectives:
                    assert isinstance(raw, Raw) and raw.op in ("reduce_scatter", "all_gather")
                    sizes = [hi - lo for lo, hi in pairwise(raw.cuts)]
                    own = sizes[raw.members.index(rank)]
                    others = len(raw.members) - 1
                    out, back = sum(sizes) - own, others * own
                    sent[rank] += out if raw.op == "reduce_scatter" else back
                    received[rank] += back if raw.op == "reduce_scatter" else out
    return max(*sent, *received)


@pytest.mark.parametrize("inside", [{}, {"reduce_roots": (2, 3)}, {"reduce_roots": (1,)}, {"pcie_switch_size": 2}])
def test_roots_and_switches_are_priced_by_what_programs_move(inside: dict[str, Any]) -> None:
    """Within nodes what the busiest rank moves; between nodes each element once, by the roots alone; at the encodes what each of them has."""
    numel, k = 1 << 20, 4
    cluster = Cluster("c", 2, k, Link(8e-3, 0.0), Link(8e-3, 0.0), servers=2, **inside)  # a byte takes 1 us everywhere
    roots = inside.get("reduce_roots", ())
    ranks = Ranks((k, k), (roots, roots) if roots else (), (inside.get("pcie_switch_size", 0),) * 2)
    option = ("intra.reduce_scatter", "comp@gpu", "inter.push.c", "inter.pull.c", "decomp@gpu", "intra.all_gather")
    codec = replace(CODEC, curves={"gpu": CODEC.curves["gpu"], "server": CODEC.curves["gpu"]})
    priced = tasks(option, cluster, codec)
    for action, name in ((0, "intra.reduce_scatter"), (5, "intra.all_gather")):
        us = sum(task.per_element_us for task in priced if task.action == name and task.resource == INTRA)
        assert us == pytest.approx(4 * _most_within_a_node(option, action, ranks, numel) / numel, rel=1e-3), name
    owners = len(roots) or k
    assert next(task.share for task in priced if task.action == "comp@gpu") == 1 / owners
    pushed = next(task.per_element_us for task in priced if task.action == "inter.push.c" and task.resource == SEND)
    served = [
        sum(hi - lo for step in p.steps if isinstance(step, Serve) for lo, hi in step.pieces) for p in compile_option(option, numel, ranks)
    ]
    assert pushed == pytest.approx(PAYLOAD * sum(served[:k]) / numel) == pytest.approx(PAYLOAD)
    assert sum(map(bool, served)) == 2 * owners, "roots alone push"


def test_sums_between_switches_go_at_the_hosts_rate() -> None:
    """Of 4 bytes an element, four GPUs, two behind each switch: half of them behind it, and half of the half between the two."""
    cluster = Cluster("c", 2, 4, Link(8e-3, 1.0), Link(8e-3, 1.0), host=Link(8e-4, 10.0), pcie_switch_size=2)
    found = [
        task for task in tasks(("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"), cluster, CODEC) if task.resource == INTRA
    ]
    assert [(task.fixed_us, task.per_element_us) for task in found] == [(1.0, 2.0), (10.0, 10.0), (1.0, 2.0), (10.0, 10.0)]
