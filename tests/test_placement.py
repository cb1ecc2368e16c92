"""Placement: each server gets the share that its machine can carry, as derived by hand; BytePS's hash functions compute what BytePS computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import ConfigError, UsageError
from psgc.layout import BucketSpec, Declaration, Layout, Machines, TensorSpec, build_layout
from psgc.layout.byteps_hash import HashPlacement, built_in, djb2, mixed, naive, sdbm
from psgc.layout.placement import Load, Placement
from psgc.program.ranks import Ranks
from psgc.reproduce import exchange as benchmark
from psgc.scheduler.roster import Member, Roster
from psgc.wire.messages import Register

JOBS = [(n, k) for n in (2, 3, 4, 7, 16, 32) for k in range(n + 1)]


def test_the_shares_are_those_that_two_links_of_equal_load_give() -> None:
    """By hand: a worker machine sends its gradients M but for its own server's share g, and that server's sums to n - 1 others: M + (n - 2) g. Another
    machine sends its share c to n workers: n c. Equal, with k c + n g = M, they are g = (n - k) M / D and c = 2 (n - 1) M / D, D = n^2 + k n - 2 k."""
    for n, k in JOBS:
        d = n * n + k * n - 2 * k
        worker, other = Fraction(n - k, d), Fraction(2 * (n - 1), d)
        assert k * other + n * worker == 1
        busiest = 1 + (n - 2) * worker
        assert not k or busiest == n * other
        shares, least = benchmark.machines_of(n, k).ideal()
        assert least == pytest.approx(float(busiest), abs=1e-9)
        if n > 2:  # where there are two workers, every share of a worker machine costs the same
            np.testing.assert_allclose(shares, [float(other)] * k + [float(worker)] * n, atol=1e-9)
    assert Machines((0, 0, 1), (1, 1, 1)).ideal()[0].tolist() == pytest.approx([0.25, 0.25, 0.5]), "two servers of a machine share its link"
    even, least = benchmark.machines_of(4, 4).ideal(work=100.0)
    assert even.tolist() == pytest.approx([1 / 8] * 8) and least == pytest.approx(100 / 8), "where sums take longest, processors count"


def test_machines_are_those_that_members_registered_from() -> None:
    roster = Roster(nodes=2, servers=3)
    hosts = {
        "worker": ["boot1/net1/pid1", "boot2/net1/pid1", "boot2/net1/pid2"],
        "server": ["boot3/net1/pid1", "boot2/net1/pid9", "boot1/net2/pid1"],
    }
    for node, local_rank, size, host in ((0, 0, 1, 0), (1, 0, 2, 1), (1, 1, 2, 2)):
        register = Register("worker", "", hosts["worker"][host], "h", node, 0, 2, 3, node, local_rank, size)
        roster.add(Member(b"w%d" % host, register, 0.0))
    for index, host in enumerate(hosts["server"]):
        roster.add(Member(b"s%d" % index, Register("server", "", host, "h", index, 0, 2, 3, index=2 - index), 0.0))
    roster.number(1)
    machines = roster.machines()
    assert machines.colocated == (False, True, False), "server 2 has a machine of its own, server 0 a network of its own"
    assert sorted(machines.workers) == [0, 0, 1, 2] and machines.workers[machines.servers[1]] == 2 and machines.nodes == 2


def test_parts_of_real_models_lie_on_machines_within_a_twentieth_of_the_best() -> None:
    """A sample of benchmarks/placement.py."""
    for model in ("resnet50", "gpt2"):
        declaration = benchmark.declared(model)
        for n, k in ((2, 0), (3, 2), (8, 0), (8, 3), (16, 16), (24, 24), (32, 1), (32, 32)):
            machines = benchmark.machines_of(n, k)
            parts = benchmark.placed_by_psgc(declaration, machines)
            assert benchmark.bytes_over_optimum(parts, machines) <= 1.05, (model, n, k)
            best = benchmark.exchange_s(benchmark.spread_ideally(parts, machines), machines)
            assert benchmark.exchange_s(parts, machines) <= 1.05 * best, (model, n, k)
            assert parts.numel.sum() == sum(tensor.numel for tensor in declaration.tensors)
    machines = benchmark.machines_of(8, 4)
    hashed = benchmark.placed_by_byteps(benchmark.declared("resnet50"), machines, "mixed")
    assert benchmark.bytes_over_optimum(hashed, machines) > 1.2


def test_the_simulated_exchange_of_one_part_is_its_five_stages_one_after_the_other() -> None:
    """One part of 1 GB on a server beside one of two workers, at 1 GB/s: the other's push over two links, the sum of both, and the pull over two links."""
    machines = Machines((1,), (1, 1))
    took = benchmark.exchange_s(benchmark.Parts(np.array([2.5e8]), np.array([0])), machines, bytes_per_s=1e9)
    piece = 1.0 / benchmark.PIECES
    summing = 2.5e8 * 0.35e-9 / 4
    assert took == pytest.approx(2 * (1 + piece) + summing), (
        "the second link is a piece behind the first; one contribution is summed meanwhile"
    )


def test_at_every_part_each_server_has_its_share_but_for_the_largest_part() -> None:
    machines = benchmark.machines_of(8, 4)
    shares, _ = machines.ideal()
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, 4000).tolist()
    placement, loads = Placement(machines, Load(sum(sizes))), np.zeros(12)
    for number, size in enumerate(sizes):
        loads[placement.place(Load(size))] += size
        if number < 3800:  # then machines are full
            assert np.abs(loads - shares * loads.sum()).max() <= 2 * 99
    assert placement.excess.bytes <= 0.01 * placement.excess.least


def test_a_plans_own_servers_win_and_layouts_of_one_part_each_come_to_every_server_by_its_share() -> None:
    machines = benchmark.machines_of(4, 2)
    tensor = TensorSpec("w", (3 * 4096,), "float32")
    planned = Declaration("m", "plan", (tensor,), "none", True, buckets=(BucketSpec((0,), "none", 0, 3, servers=(5, 5, 0)),), hashed="djb2")
    layout = build_layout(planned, layout_id=1, servers=6, workers=4, machines=machines)
    assert [part.server for part in layout.buckets[0].parts] == [5, 5, 0]
    one = Declaration("m", "adhoc", (tensor,), "none", True)
    places = Counter(_server(build_layout(one, layout_id=number, servers=6, workers=4, machines=machines)) for number in range(1, 241))
    shares, _ = machines.ideal()
    assert [places[server] / 240 for server in range(6)] == pytest.approx(shares.tolist(), abs=0.05)


def _server(layout: Layout) -> int:
    return layout.buckets[0].parts[0].server


def test_hashes_are_byteps_own() -> None:
    """built_in: printed by std::hash<std::string> of g++ 12. The others by hand, from the formulas in byteps/common/global.cc."""
    known = {0: 2297668033614959926, 65537: 12950948673254219068, 8060973: 7741588426578029323, 12345678901234567: 4786737806892549399}
    assert {key: built_in(key) for key in known} == known
    assert built_in(0, 3) == 3 * known[0] % 2**64
    assert naive((7 << 16) + 5) == 12 * 9973
    assert djb2(10) == (5381 * 33 + ord("1")) * 33 + ord("0")
    assert sdbm(10) == ord("1") * 65599 + ord("0")
    assert djb2(1 << 62) < 2**64 and sdbm(1 << 62) < 2**64
    # n = 8, k = 4: ratio 56 / 88, threshold 64.3 of 101. Key 0: djb2 is 177621, modulo 101 it is 63: a machine of its own, and
    # djb2(63) = 5861742, modulo 4. Key 2: 65, so a worker machine: djb2(65) = 5861744 modulo 8, behind the four.
    assert [mixed(key, 8, 4) for key in (0, 2)] == [5861742 % 4, 4 + 5861744 % 8]
    assert {mixed(key, 4, 0) for key in range(500)} == {0, 1, 2, 3}


def test_hashes_choose_the_servers_of_a_layouts_parts() -> None:
    machines = benchmark.machines_of(3, 2)
    tensors = (TensorSpec("a", (9 * 4096,), "float32"), TensorSpec("b", (5,), "float32", 1))
    declared = Declaration("m", "plan", tensors, "none", True, part_bytes=65536, order=(0, 1))
    for text, expected in (
        ("naive", [0 * 9973 % 5, 1 * 9973 % 5, 2 * 9973 % 5, 1 * 9973 % 5]),
        ("djb2", [djb2(key) % 5 for key in (0, 1, 2, 1 << 16)]),
        ("mixed:101", [mixed(key, 3, 2) for key in (0, 1, 2, 1 << 16)]),
    ):
        layout = build_layout(replace(declared, hashed=text), layout_id=1, servers=5, workers=3, machines=machines)
        assert [part.server for _, part in layout.parts()] == expected, text
    last = Machines((3, 4, 5, 0, 1), (0, 0, 0, 1, 1, 1))  # here the servers on worker machines are numbered first
    assert [HashPlacement("mixed").server(0, part, last) for part in range(9)] == [[3, 4, 0, 1, 2][mixed(part, 3, 2)] for part in range(9)]


def test_what_byteps_would_abort_at_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"3 worker machine\(s\) and 7 server\(s\): it needs a server on each worker machine"):
        HashPlacement("mixed").check(7, 3)
    with pytest.raises(UsageError, match="BYTEPS_MIXED_MODE_BOUND=4 is less than the number of servers, 5"):
        HashPlacement("mixed", bound=4).check(5, 3)
    for text in ("md5", "mixed", "djb2:3", "mixed:x"):
        with pytest.raises(UsageError, match="expected one of"):
            HashPlacement.parse(text)
    with pytest.raises(ConfigError, match="BYTEPS_ENABLE_MIXED_MODE is not 1"):
        Config.from_env({"BYTEPS_KEY_HASH_FN": "mixed"})


def test_bytepss_names_choose_the_hash_and_nothing_chooses_psgcs_placement() -> None:
    for env, text in (
        ({}, ""), ({"BYTEPS_KEY_HASH_FN": "naive"}, "naive"), ({"BYTEPS_KEY_HASH_FN": "built_in", "BYTEPS_BUILT_IN_HASH_COEF": "7"}, "built_in:7"),
        ({"BYTEPS_ENABLE_MIXED_MODE": "1"}, "mixed:101"), ({"BYTEPS_ENABLE_MIXED_MODE": "1", "BYTEPS_MIXED_MODE_BOUND": "64"}, "mixed:64"),
    ):  # fmt: skip
        assert Config.from_env(env).hashed == text
        assert not text or HashPlacement.parse(text).text == text


def test_a_key_that_few_contribute_to_weighs_as_many_contributions() -> None:
    """Behind sums within two nodes of three ranks each, two of six ranks push a key: it weighs a third of a bucket that all push."""
    tensors = (TensorSpec("a", (6 * 4096,), "float32"), TensorSpec("b", (2 * 4096,), "float32"))
    option = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    buckets = (BucketSpec((0,), "none", 1, 1, option=option), BucketSpec((1,), "none", 0, 2))
    declared = Declaration("m", "plan", tensors, "none", True, buckets=buckets)
    layout = build_layout(declared, layout_id=1, servers=2, workers=6, ranks=Ranks((3, 3)), machines=Machines((0, 1), (0, 0, 3, 3)))
    keys = layout.buckets[0].keys
    assert [len(key.contributors) for key in keys] == [2, 2, 2]
    loads = Counter({0: 0.0, 1: 0.0})
    for key in keys:
        loads[key.server] += key.numel / 3
    for part in layout.buckets[1].parts:
        loads[part.server] += part.numel
    assert abs(loads[0] - loads[1]) <= 4096
