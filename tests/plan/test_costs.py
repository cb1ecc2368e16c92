"""What options cost: by hand for a few, and laws for all of them."""

from __future__ import annotations

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve
from psgc.plan.model.costs import BOTH_WAYS, CPU, GPU, INTRA, RECEIVE, SEND, SERVER, CodecCosts, Held, Task, tasks, walk
from psgc.plan.model.options import Option, all_options, server_options

# a byte takes 1 us within a node and 10 us between nodes
CLUSTER = Cluster("c", nodes=4, gpus_per_node=2, intra=Link(8e-3, 1.0), inter=Link(8e-4, 100.0), servers=2)
PAYLOAD = 0.5  # bytes an element
CODEC = CodecCosts("half", PAYLOAD, {"gpu": CostCurve((1.0, 2.0), (3.0, 6.0), (1.0, 2.0))})


def by_action(*option: str) -> dict[str, Task]:
    return {task.action: task for task in tasks(option, CLUSTER, CODEC)}


def test_a_ring_passes_each_nodes_link_once() -> None:
    (task,) = tasks(("flat.all_reduce",), CLUSTER, CODEC)
    assert (task.resource, task.fixed_us) == (BOTH_WAYS, 14 * 100)
    assert task.per_element_us == pytest.approx(2 * 7 / 8 * 4 * 10)


def test_hierarchy_shares_the_nodes_link_among_its_ranks() -> None:
    found = by_action("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    assert found["intra.reduce_scatter"] == ("intra.reduce_scatter", INTRA, 1.0, pytest.approx(4 / 2), "", 1.0, 1.0)
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
    made = tasks(option, CLUSTER, CODEC)
    assert [(task.share, task.times) for task in made if task.curve] == [
        (1.0, 2.0),
        (1 / 8, 8.0),
        (1 / 8, 1.0),
        (1.0, 1.0),
    ]  # the CPU is two ranks'
    assert made[1].per_element_us == pytest.approx(7 / 8 * PAYLOAD * 10 * 2 * 6 / 7)  # two ranks' bytes, but for what stays in the node
    assert made[4].per_element_us == pytest.approx(7 / 8 * PAYLOAD * 10)
    assert [task.resource for task in made if task.curve] == [CPU, GPU, GPU, GPU]


def test_of_a_flat_gather_the_roots_link_carries_what_comes_from_other_nodes() -> None:
    found = by_action("comp@gpu", "flat.gather.c", "flat.broadcast.c", "decomp@gpu")
    assert found["flat.gather.c"].per_element_us == pytest.approx(6 * PAYLOAD * 10)
    assert found["flat.broadcast.c"].per_element_us == pytest.approx(8 * PAYLOAD * 10)  # all 8 payloads


def test_servers_links_can_be_the_narrow_ones() -> None:
    found = by_action("flat.push", "flat.pull")
    assert found["flat.push"] == ("flat.push", SEND, 100.0, pytest.approx(4 * 10 * 2 * 4 / 2), "", 1.0, 1.0)  # 8 ranks into 2 servers
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
    assert [(task.curve, task.share, task.times) for task in made] == [("server.decode", 1 / 4, 8.0), ("server.encode", 1 / 2, 1.0)]


def test_answers_may_be_of_another_size_than_pushes() -> None:
    answers = CodecCosts("half/float", PAYLOAD, CODEC.curves, pull_bytes_per_element=4.0)
    found = {
        task.action: task for task in tasks(("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu"), CLUSTER, answers) if not task.curve
    }
    assert found["flat.pull.c"].per_element_us == pytest.approx(8 * found["flat.push.c"].per_element_us)


def test_what_is_not_encoded_is_copied_where_the_profile_has_times_for_it() -> None:
    raw = CodecCosts("half", PAYLOAD, {}, raw={"cpu": CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))})
    made = tasks(("flat.push", "flat.pull"), CLUSTER, raw)
    assert [task.resource for task in made] == [CPU, SEND, SERVER, SERVER, RECEIVE, CPU]
    assert raw.task_us(made[2], 10.0) == pytest.approx(10 / 2 * 8)


def test_without_times_of_the_workers_own_copies_no_copies_are_counted() -> None:
    alone = CodecCosts("half", PAYLOAD, CODEC.curves, raw={"server": CostCurve((1.0,), (1.0,), (1.0,))})
    assert tasks(("flat.push", "flat.pull"), CLUSTER, alone) == tasks(("flat.push", "flat.pull"), CLUSTER, CODEC)
