"""Who is slow, and where: by hand, from what members report; and how they come to report it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.observe.figures import Figures, Spent
from psgc.observe.lately import LAST_S, LEAST_STEPS, MOST_STEPS, OLD_S, Busy, LastSteps, Shares
from psgc.observe.live import view
from psgc.observe.others import beyond_others
from psgc.observe.slow import CLEAR_SHARE, LEAST_MS, slow_members
from psgc.scheduler.slowness import AGAIN_S, HOLD_S
from psgc.server.state import Fold, ServerState, specs_of
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.reports import MOST_NAMES, Observed, Report, ReportOf, shortened
from psgc.worker.client import Client
from psgc.worker.rest import Rest
from tests.scheduler.talk import complete


def worker(compute_ms: float, waits_ms: float, encode_ms: float = 0.0, servers: dict[str, Any] | None = None) -> Report:
    return Report(
        10_000,
        0,
        100,
        compute_us=int(1e3 * compute_ms),
        coding_us=int(1e3 * encode_ms),
        waits_us=int(1e3 * waits_ms),
        servers=servers or {},
    )


def server(late: dict[str, float] | None = None, sums: float = 0.05, loop: float = 0.05, longer: float = 0.0) -> Report:
    told = {rank: [ms, longer] for rank, ms in (late or {}).items()}
    return Report(10_000, 0, threads=1, late=told, sums_permille=int(1e3 * sums), loop_permille=int(1e3 * loop))


def verdict(workers: list[Report], servers: list[Report] | None = None) -> list[tuple[str, str]]:
    found = slow_members(dict(enumerate(workers)), dict(enumerate(servers or [])))
    return [(one.member, one.where) for one in found]


# by hand


def test_where_nobody_stands_out_nobody_is_named() -> None:
    assert verdict([]) == []
    assert verdict([worker(90, 10)]) == [], "alone"
    assert verdict([Report(10_000, 0), Report(10_000, 0)]) == [], "before there are enough steps"
    equal = [worker(90 + rank, 10 - rank, encode_ms=2 + rank) for rank in range(4)]
    assert verdict(equal, [server({"1": 1.0, "3": 4.0}), server({"2": 2.0})]) == []
    assert verdict([worker(1.0, 0.5), worker(1.4, 0.1)]) == [], "tenths of a millisecond are threads that wake up"


def test_a_rank_that_computes_longer_is_slow_there_and_its_late_gradients_are_no_slow_link() -> None:
    workers = [worker(40, 100), worker(40, 100), worker(135, 5), worker(42, 98)]
    assert verdict(workers, [server({"2": 95.0, "3": 2.0})]) == [("rank 2", "compute")]
    (slow,) = slow_members(dict(enumerate(workers)), {})
    assert slow.ms == pytest.approx(95)
    assert slow.share == pytest.approx(95 / 140)
    assert slow.text == "rank 2 is slow (compute): it computes for 135 ms of a step, 95 ms more than others"


def test_a_rank_that_waits_for_its_own_encoding_is_slow_there() -> None:
    workers = [worker(40, 100, 3), worker(40, 100, 83), worker(40, 100, 3)]
    assert verdict(workers, [server({"1": 81.0})]) == [("rank 1", "encode")]


def at_servers(*busy: tuple[float, float], sends: float = 0.01) -> dict[str, Any]:
    return {str(index): [share, rate, sends] for index, (share, rate) in enumerate(busy)}


def test_what_neither_computing_nor_encoding_explains_is_the_ranks_link() -> None:
    # a rank with a slow link waits as long as the others: for its own gradients to leave
    quick, slow_sends = at_servers((0.7, 1e6), (0.7, 1e6)), at_servers((0.7, 1e6), (0.7, 1e6), sends=0.6)
    workers = [worker(40, 100, 3, quick), worker(41, 99, 4, slow_sends), worker(40, 100, 3, quick)]
    servers = [server({"0": 1.0, "1": 60.0}), server({"1": 90.0, "2": 2.0})]
    assert verdict(workers, servers) == [("rank 1", "link")]
    (slow,) = slow_members(dict(enumerate(workers)), dict(enumerate(servers)))
    assert slow.ms == pytest.approx(88)
    assert (
        slow.why == "servers await its gradients for 90 ms of a step longer than others', of which computing and encoding longer are 2 ms"
    )


def test_a_link_that_is_slow_towards_the_rank_alone_is_told_by_the_server() -> None:
    workers = 3 * [worker(40, 100, 3, at_servers((0.7, 1e6)))]
    assert verdict(workers, [server({"1": 90.0}, longer=0.5)]) == [("rank 1", "link")]


def test_of_ranks_that_queue_at_a_slow_server_the_last_is_late_but_its_link_is_not_slow() -> None:
    workers = 3 * [worker(40, 100, 3, at_servers((0.7, 1e6), sends=0.5))]
    assert verdict(workers, [server({"1": 40.0, "2": 80.0})]) == []


def test_a_slow_server_is_told_from_a_slow_link_by_its_own_figures() -> None:
    workers = [worker(20, 80, servers=at_servers((0.2, 1e6), (0.7, 1e6), (0.25, 1e6))) for _ in range(2)]
    idle = server()
    assert verdict(workers, [idle, server(sums=0.6), idle]) == [("server 1", "server")]
    assert verdict(workers, [idle, server(loop=0.95), idle]) == [("server 1", "server")]
    assert verdict(workers, [idle, idle, idle]) == [("server 1", "link")]
    assert verdict(workers, [server(sums=0.6), server(sums=0.6), server(sums=0.6)]) == [("server 1", "link")], "others' sums are as long"


def test_a_server_that_holds_more_may_take_longer_by_as_much() -> None:
    more = [worker(20, 80, servers=at_servers((0.2, 1e6), (0.6, 3e6))) for _ in range(2)]
    assert verdict(more, [server(), server()]) == []
    less = [worker(20, 80, servers=at_servers((0.2, 3e6), (0.6, 1e6))) for _ in range(2)]
    assert verdict(less, [server(), server()]) == [("server 1", "link")]


def test_time_at_a_server_in_which_a_rank_waits_for_another_is_not_the_servers() -> None:
    # rank 1 is slow: the others have something at the server for all of that time, rank 1 itself has not
    early, late = at_servers((0.3, 1e6), (0.82, 1e6)), at_servers((0.1, 1e6), (0.12, 1e6))
    workers = [worker(20, 80, servers=early), worker(95, 5, servers=late), worker(20, 80, servers=early)]
    assert verdict(workers, [server({"1": 75.0}), server({"1": 74.0})]) == [("rank 1", "compute")]


def of_many_servers(count: int, busy: Callable[[int, int], float], slow_rank: int | None = None) -> list[Report]:
    """What eight ranks tell the scheduler. busy: of a rank and a server, the share of the time."""
    rng, told = random.Random(count), []
    for rank in range(8):
        at = at_servers(*((busy(rank, index) * rng.uniform(0.95, 1.05), 1e6) for index in range(count)))
        computes, waits = (140, 5) if rank == slow_rank else (40, 105)
        told.append(shortened(worker(computes, waits, servers=at)))
    return told


@pytest.mark.parametrize("count", [2, MOST_NAMES, MOST_NAMES + 1, 12, 16, 17, 20, 64])
def test_servers_of_which_a_slow_rank_does_not_tell_are_not_taken_for_slow(count: int) -> None:
    workers = of_many_servers(count, lambda rank, _: 0.05 if rank == 3 else 0.6, slow_rank=3)
    assert verdict(workers, count * [server()]) == [("rank 3", "compute")]


@pytest.mark.parametrize("count", [2, MOST_NAMES, MOST_NAMES + 1, 12, 16, 17, 20, 64])
def test_a_slow_server_is_named_among_many_also_beside_a_slow_rank(count: int) -> None:
    for which in {0, 1, count - 1}:
        servers = [server(sums=0.6 if index == which else 0.05) for index in range(count)]
        workers = of_many_servers(count, lambda _, index, which=which: 0.7 if index == which else 0.2)
        assert verdict(workers, servers) == [(f"server {which}", "server")]
        own = {True: 0.4, False: 0.1}  # rank 3's, who waits for nobody else
        workers = of_many_servers(count, lambda rank, index, which=which, own=own: own[index == which] if rank == 3 else 0.8, slow_rank=3)
        assert verdict(workers, servers) == [("rank 3", "compute"), (f"server {which}", "server")]


def test_the_only_server_is_named_by_what_it_does_itself() -> None:
    workers = [worker(20, 80, servers=at_servers((0.75, 1e6))) for _ in range(2)]
    assert verdict(workers, [server(sums=0.7)]) == [("server 0", "server")]
    assert verdict(workers, [server(loop=0.95)]) == [("server 0", "server")]
    assert verdict(workers, [server(sums=0.2, loop=0.3)]) == [], "the network is slow for everybody: nobody is slower than others"


def test_several_are_named_the_slowest_first() -> None:
    at, slow = at_servers((0.1, 1e6), (0.1, 1e6), (0.4, 1e6)), at_servers((0.1, 1e6), (0.1, 1e6), (0.4, 1e6), sends=0.7)
    workers = [worker(40, 160, 2, at), worker(120, 80, 2, at), worker(40, 160, 2, slow), worker(40, 160, 90, at), worker(40, 160, 2, at)]
    servers = [server({"1": 80.0, "2": 150.0, "3": 88.0}), server(), server(sums=0.4)]
    assert verdict(workers, servers) == [("rank 2", "link"), ("rank 3", "encode"), ("rank 1", "compute"), ("server 2", "server")]
    assert verdict([worker(40, 100), worker(140, 0), worker(140, 0)]) == [("rank 1", "compute"), ("rank 2", "compute")], "two of three"
    assert verdict([worker(40, 100)] + 3 * [worker(140, 0)]) == [], "most of them: one is quick"


def test_of_two_workers_the_slower_one_is_named() -> None:
    assert verdict([worker(100, 5), worker(40, 65)]) == [("rank 0", "compute")]
    assert verdict([worker(40, 65, 50), worker(40, 65, 2)]) == [("rank 0", "encode")]
    slow = at_servers((0.6, 1e6), sends=0.5)
    assert verdict([worker(40, 65), worker(40, 65, servers=slow)], [server({"1": 55.0})]) == [("rank 1", "link")]


def test_where_ranks_do_not_wait_for_each_other_nobody_is_slow() -> None:
    assert verdict([worker(40, 1), worker(140, 1), worker(40, 1)]) == [], "asynchronous training"


def test_without_servers_computing_and_encoding_are_told() -> None:
    assert verdict([worker(40, 100), worker(130, 10), worker(40, 100)]) == [("rank 1", "compute")]
    assert verdict([worker(40, 100, 1), worker(40, 100, 70), worker(40, 100, 1)]) == [("rank 1", "encode")]


def observed(reports: list[Report], silent_ms: dict[int, int], left: tuple[int, ...] = ()) -> Observed:
    def plain(report: Report) -> dict[str, Any]:
        return {name: getattr(report, name) for name in Report.__dataclass_fields__}

    rows = [ReportOf("worker", rank, "here", 1, rank in left, silent_ms.get(rank, 0), plain(one)) for rank, one in enumerate(reports)]
    return Observed(1, "v", len(reports), 0, True, tuple(rows))


def test_a_member_whose_report_is_old_is_awaited_and_its_figures_count_for_nobody() -> None:
    workers = [worker(40, 100), worker(40, 100), worker(140, 0)]
    seen = view(observed(workers, {}))
    assert [(one.member, one.where) for one in seen.slow] == [("rank 2", "compute")]
    assert (seen.awaited, seen.slowest_rank) == (("rank 2",), 2)
    seen = view(observed(workers, {2: 7_000}))
    assert (seen.slow, seen.awaited) == ((), ("rank 2",))
    assert view(observed(workers, {}, left=(2,))).slow == ()


def test_a_rank_with_a_slow_link_is_the_slowest_though_another_waits_less() -> None:
    slow = at_servers((0.7, 1e6), sends=0.6)
    workers = [
        replace(worker(40, 100), waited_ms=7_000, exchange_ms=8_000), replace(worker(40, 104, servers=slow), waited_ms=7_400, exchange_ms=8_000)
    ]  # fmt: skip
    rows = observed(workers, {}).members
    told = ReportOf(
        "server", 0, "here", 2, False, 0, {**{n: getattr(server(), n) for n in Report.__dataclass_fields__}, "late": {"1": [90.0, 0.0]}}
    )
    seen = view(Observed(1, "v", 2, 1, True, (*rows, told)))
    assert (seen.slowest_rank, seen.awaited) == (1, ("rank 1",))


def test_a_slow_server_is_awaited_and_no_rank_is_the_slowest() -> None:
    workers = [replace(worker(20, 80, servers=at_servers((0.2, 1e6), (0.7, 1e6))), waited_ms=7_000 - 500 * rank) for rank in range(2)]
    rows = observed(workers, {}).members
    told = [{name: getattr(one, name) for name in Report.__dataclass_fields__} for one in (server(), server(sums=0.6))]
    of_servers = [ReportOf("server", index, "here", 2, False, 0, report) for index, report in enumerate(told)]
    seen = view(Observed(1, "v", 2, 2, True, (*rows, *of_servers)))
    assert (seen.slowest_rank, seen.awaited) == (None, ("server 1",))


numbers = st.floats(0, 1e6)
reports = st.builds(
    worker,
    numbers,
    numbers,
    numbers,
    st.dictionaries(st.sampled_from("0123"), st.tuples(st.floats(0, 1), numbers, st.floats(0, 1)).map(list), max_size=4),
)
of_servers = st.builds(server, st.dictionaries(st.sampled_from("0123"), numbers), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))


@given(st.lists(reports, max_size=5), st.lists(of_servers, max_size=4))
def test_whatever_is_told_whoever_is_named_is_clearly_slower_and_others_wait(workers: list[Report], servers: list[Report]) -> None:
    found = slow_members(dict(enumerate(workers)), dict(enumerate(servers)))
    assert len({one.member for one in found}) == len(found)
    for one in found:
        assert one.ms >= LEAST_MS
        assert one.share >= min(CLEAR_SHARE, 0.5) - 1e-9
        role, _, index = one.member.partition(" ")
        others = [report for rank, report in enumerate(workers) if role != "rank" or rank != int(index)]
        assert max(report.waits_us for report in others) / 1e3 >= one.ms / 2 - 1e-6


def test_a_server_with_less_than_a_byte_a_second_is_no_measure_for_another() -> None:
    ranks = {0: worker(0.0, 1.0, 0.0, {"0": [0.0, 1.0, 0.0], "1": [0.0, 5e-324, 0.0]})}
    assert list(slow_members(ranks, {0: server()})) == []


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 100), min_size=2))
def test_beyond_others_is_beyond_the_lower_median_of_the_others(values: dict[int, int]) -> None:
    for of, found in beyond_others(values).items():
        others = sorted(value for other, value in values.items() if other != of)
        assert found == max(0, values[of] - others[(len(others) - 1) // 2])


# what a worker tells


def test_medians_are_of_the_last_seconds_or_of_a_few_long_steps() -> None:
    last = LastSteps()
    for step in range(LEAST_STEPS - 1):
        last.add(step, (1.0, 2.0))
    assert last.medians(5.0) == []
    last.add(5.0, (100.0, 2.0))
    assert last.medians(5.0) == [1.0, 2.0], "one pause is none"
    for step in range(50):
        last.add(6.0 + step / 10, (3.0, 4.0))
    assert last.medians(11.0) == [3.0, 4.0]
    for step in range(LEAST_STEPS):
        last.add(100.0 + step * LAST_S, (5.0, 6.0))
    assert last.medians(150.0) == [5.0, 6.0], "older ones are too old"
    assert last.medians(1e6) == [5.0, 6.0], "but for the last few"
    for step in range(MOST_STEPS):
        last.add(1e6, (7.0 + step, 8.0))
    assert last.medians(1e6) == [7.0 + (MOST_STEPS - 1) / 2, 8.0]


def test_steps_that_are_long_over_are_forgotten_where_nothing_is_to_be_told_of_them_then() -> None:
    for apart_s, told_s in ((1.0, OLD_S), (OLD_S, (LEAST_STEPS - 1) * OLD_S)):
        last = LastSteps(forgets=True)
        for step in range(LEAST_STEPS):
            last.add(apart_s * step, (1.0,))
        newest = apart_s * (LEAST_STEPS - 1)
        assert last.medians(newest + told_s) == [1.0]
        assert last.medians(newest + told_s + 1.0) == [], f"of steps that took {apart_s:g} s each"


def test_shares_are_of_the_last_seconds() -> None:
    shares = Shares()
    assert shares.grown(100.0, (0.0, 0.0)) == []
    assert shares.grown(100.1, (0.1, 5.0)) == [], "too soon to say"
    assert shares.grown(101.0, (0.5, 10.0)) == [0.5, 10.0]
    for second in range(2, 30):
        found = shares.grown(100.0 + second, (0.5 + 0.25 * (second - 1), 10.0))
    assert found == [0.25, 0.0]


def test_what_is_under_way_side_by_side_counts_once() -> None:
    busy = Busy()
    for now, call in ((1.0, busy.begin), (2.0, busy.begin), (3.0, busy.end), (5.0, busy.end), (8.0, busy.begin)):
        call(now)
    assert busy.so_far_s(10.0) == 6.0


def step(figures: Figures, began: float, computes: float, encodes: float, travels: float, decodes: float, device: float = 0.0) -> float:
    """One step whose training thread waits from its last gradient on. Returns its end."""
    waits = began + computes
    figures.submitted(waits)
    figures.waits(waits, counts=True)
    if device:
        figures.made_at = waits + device
    figures.encoded_at = waits + device + encodes
    figures.arrived_at = figures.encoded_at + travels
    end = figures.arrived_at + decodes
    figures.means_came(end - waits, end, counts=True)
    return end


def test_a_step_is_split_into_computing_own_coding_and_waiting() -> None:
    figures, now, rested, before = Figures(0.0), 0.0, 0.0, Spent()
    for number in range(LEAST_STEPS + 1):
        began = now
        now = step(figures, began, 0.040, 0.003, 0.050, 0.007)
        rested += 0.060
        spent = figures.spent(rested)
        figures.step_over(None if not number else now - began, now, spent, before)
        before = spent
        if number < LEAST_STEPS:
            assert figures.lately(now, rested) == []
    assert figures.lately(now, rested) == pytest.approx([0.040, 0.010, 0.060])
    assert figures.lately(now + 7.0, rested + 0.1) == pytest.approx([6.9, 0.010, 0.1]), "a step that takes longer already"


def test_what_a_device_computes_while_the_thread_waits_is_computing() -> None:
    figures, now, rested, before = Figures(0.0), 0.0, 0.0, Spent()
    for _ in range(LEAST_STEPS):
        began = now
        now = step(figures, began, 0.010, 0.002, 0.050, 0.001, device=0.080)
        rested += 0.133
        spent = figures.spent(rested)
        figures.step_over(now - began, now, spent, before)
        before = spent
    assert figures.lately(now, rested) == pytest.approx([0.090, 0.003, 0.053])


def test_encoding_that_is_over_before_anybody_waits_holds_up_nobody() -> None:
    figures = Figures(0.0)
    figures.encoded_at, figures.arrived_at = 1.0, 2.0
    figures.means_came(0.5, 3.0, counts=True)
    assert figures.spent(0.5).coding == pytest.approx(0.5), "what had come was being decoded"
    figures.arrived_at = 6.0
    figures.means_came(1.0, 6.0, counts=True)
    assert figures.spent(0.5).coding == pytest.approx(0.5)


def test_waits_that_the_session_does_not_see_count_too() -> None:
    figures = Figures(0.0)
    figures.means_came(0.5, 3.0, counts=True, rested=False)
    assert figures.spent(0.25).waited == 0.75


def test_the_thread_that_trains_is_seen_to_rest_also_while_it_does() -> None:
    rest = Rest()
    with rest.resting():
        during = rest.rested_s(1e12)
    assert during > 1e6
    assert 0 <= rest.rested_s(1e12) < 1e6


def test_who_waits_in_the_trainers_stead_lets_it_rest_and_is_kept_for_it() -> None:
    """As autograd's thread at backward's end, on a GPU."""
    rest, waits, go_on, over = Rest(), threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        with rest.in_trainers_stead(), rest.resting():
            waits.set()
            go_on.wait()
        over.set()

    assert not rest.keep(rest.trains)
    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    waits.wait()
    assert rest.rests(rest.trains) and rest.rested_s(1e12) > 1e6
    assert rest.keep(rest.trains)
    go_on.set()
    assert not over.wait(0.05), "kept where it is"
    rest.let_go(rest.trains)
    for thread in threads:
        thread.join()
    assert over.is_set() and not rest.rests(rest.trains)
    assert 0.05 <= rest.rested_s(1e12) < 1e6
    with rest.resting():
        assert rest.rests(threading.get_ident())


LAYOUT = build_layout(
    Declaration("t", "plan", tuple(TensorSpec(f"t{i}", (16,), "float32") for i in range(2)), "none", True, used=(0, 1), fuse_bytes=0),
    layout_id=1, servers=1, workers=2,
)  # fmt: skip
KEYS = [part.key for _, part in LAYOUT.parts()]


def test_a_worker_counts_the_time_in_which_a_server_has_something_of_its_gradients() -> None:
    client = Client(0, 1, 1, 1)
    client.add_layout(LAYOUT, dict.fromkeys(KEYS, 0))
    client.connected(0, 0.0)

    def result(key: int, now: float) -> None:
        header = Header(
            Kind.RESULT, job=1, epoch=1, plan=1, key=key, step=client.parts[key].step, sender=0x80000000, contributors=2, payload_bytes=64
        )
        client.receive(0, header, bytes(64), now)
        client.taken(key)

    client.receive(0, Header(Kind.WINDOW, job=1, epoch=1, plan=1, step=100, sender=0x80000000), None, 0.0)
    client.submit(KEYS[0], 10.0, 64)
    client.submit(KEYS[1], 11.0, 64)
    assert client.served(12.0) == [(2.0, 0)]
    result(KEYS[1], 13.0)
    result(KEYS[0], 14.0)
    assert client.served(20.0) == [(4.0, 256)]
    client.submit(KEYS[0], 30.0, 64)
    result(KEYS[0], 30.5)
    assert client.served(40.0) == [(4.5, 384)]


# what a server tells


def push(state: ServerState, key: int, number: int, rank: int, now: float) -> list[Any]:
    return state.receive(
        f"peer {rank}", Header(Kind.PUSH, Flag.WANT_RESULT, 1, 1, key >> 48, key, number, 0, 0, rank, 0, 1.0, 64), bytes(64), now
    )


def lay_out(state: ServerState, number: int = 1) -> list[int]:
    """Have the server serve a layout of two keys, which are returned."""
    layout = build_layout(
        Declaration(f"t {number}", "plan", tuple(TensorSpec(f"t{i}", (16,), "float32") for i in range(2)), "none", True, used=(0, 1), fuse_bytes=0),
        layout_id=number, servers=1, workers=state.workers,
    )  # fmt: skip
    state.register(layout, *specs_of(layout, 0, state.workers))
    return [part.key for _, part in layout.parts()]


def serves(workers: int) -> tuple[ServerState, list[int]]:
    """A server of two keys, to which everyone is connected."""
    state = ServerState(0, workers, 1, 1)
    keys = lay_out(state)
    for rank in range(workers):
        state.joined(f"peer {rank}", rank)
    return state, keys


def take_steps(
    state: ServerState, keys: list[int], steps: int, after_s: dict[int, float], first: int = 1, first_at: float | None = None
) -> None:
    """Steps of a second each. after_s: by rank, when it contributes; each key 0.1 s after the one before."""
    later = 0.0 if first_at is None else first_at - first
    for number in range(first, first + steps):
        pushes = [(later + number + 0.1 * place + after, rank, key) for place, key in enumerate(keys) for rank, after in after_s.items()]
        for now, rank, key in sorted(pushes):
            for effect in push(state, key, number, rank, now):
                if isinstance(effect, Fold):
                    state.folded(effect.key, effect.last, 64, False, effect.slot, now)


def late_ms(state: ServerState, now: float = 0.0) -> dict[int, float]:
    return {rank: pytest.approx(ms) for rank, ms in state.punctuality.late_ms(now).items()}


def test_a_server_tells_for_how_long_it_awaits_a_rank_whichever_keys_these_are() -> None:
    state, keys = serves(2)
    take_steps(state, keys, LEAST_STEPS - 1, {0: 0.0, 1: 0.2})
    assert late_ms(state) == {}, "too few steps"
    take_steps(state, keys, 2, {0: 0.0, 1: 0.2}, first=LEAST_STEPS)
    assert late_ms(state) == {1: 300}, "from the first key's first contribution to the last key's last one"


def test_a_repeat_is_no_contribution() -> None:
    state, keys = serves(2)
    for number in range(1, LEAST_STEPS + 1):
        for now, rank, step_of in ((0.0, 0, number), (0.1, 0, number), (0.15, 1, number - 1), (0.2, 1, number)):
            effects = [effect for key in keys for effect in push(state, key, step_of, rank, number + now)]
        for fold in [effect for effect in effects if isinstance(effect, Fold)]:
            state.folded(fold.key, fold.last, 64, False, fold.slot, number + 0.25)
    assert late_ms(state) == {1: 200}
    assert state.punctuality.folds.so_far_s(100.0) == pytest.approx(0.05 * LEAST_STEPS)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 12])
def test_whoever_is_late_is_so_beyond_the_others_however_many_there_are(workers: int) -> None:
    state, keys = serves(workers)
    take_steps(state, keys[:1], LEAST_STEPS, {**{rank: 0.01 * rank for rank in range(workers - 1)}, workers - 1: 0.5})
    assert late_ms(state) == {}, "its layout's last key has had no step"
    state, keys = serves(workers)
    take_steps(state, keys, LEAST_STEPS, {**dict.fromkeys(range(workers - 1), 0.0), workers - 1: 0.5})
    assert late_ms(state) == {workers - 1: 600}
    if workers > 3:
        state, keys = serves(workers)
        take_steps(state, keys, LEAST_STEPS, {**dict.fromkeys(range(workers - 2), 0.0), workers - 2: 0.3, workers - 1: 0.5})
        assert late_ms(state) == {workers - 2: 400, workers - 1: 600}


def test_a_pause_now_and_then_is_not_late_in_most_steps() -> None:
    state, keys = serves(3)
    for number in range(1, 16):
        take_steps(state, keys, 1, {rank: 0.5 if number % 3 == rank else 0.0 for rank in range(3)}, first=number)
    assert late_ms(state) == {}


def test_the_latest_of_many_ranks_are_told() -> None:
    state, keys = serves(40)
    take_steps(state, keys, LEAST_STEPS, {rank: max(0.0, (rank - 25) / 100) for rank in range(40)})
    assert list(late_ms(state)) == list(range(40 - MOST_NAMES, 40))


def test_a_rank_that_the_job_goes_on_without_is_awaited_no_more() -> None:
    state, keys = serves(3)
    take_steps(state, keys, 1, {0: 0.0, 1: 0.25, 2: 0.0})
    for rank, now in ((0, 2.0), (1, 2.25)):
        for key in keys:
            push(state, key, 2, rank, now)
    for effect in state.leave_out(2, 1, 2.5):
        if isinstance(effect, Fold):
            state.folded(effect.key, effect.last, 64, False, effect.slot, 2.5)
    take_steps(state, keys, 16, {0: 0.0, 1: 0.25}, first=3)
    assert late_ms(state) == {1: 350}


@pytest.mark.parametrize("order", ["successor first", "retired first", "between two others"])
def test_steps_of_a_layout_that_follows_another_count_whenever_servers_hear_that_the_other_has_ended(order: str) -> None:
    state, keys = serves(3)
    between = lay_out(state, 2) if order == "between two others" else []
    take_steps(state, keys, 10, {0: 0.0, 1: 0.3, 2: 0.0})
    assert late_ms(state, 11.0) == {1: 400}
    retire = Header(Kind.RETIRE, 0, 1, 1, 1, sender=0)
    if order == "retired first":
        state.receive("peer 0", retire, None, 11.0)
    keys = lay_out(state, 3)
    state.receive("peer 0", retire, None, 11.0)
    assert not any(key >> 48 == 1 for key in state.keys)
    take_steps(state, keys, 30, {0: 0.0, 1: 0.0, 2: 0.5}, first_at=20.0)
    assert late_ms(state, 51.0) == {2: 600}, "the newest layout's"
    assert [key for key, entry in state.keys.items() if entry.waits is not None and entry.waits.last] == keys[-1:]
    assert len(state.keys) == len(keys) + len(between)


def test_who_was_late_is_told_of_no_more_when_no_steps_are_taken() -> None:
    state, keys = serves(2)
    take_steps(state, keys, 10, {0: 0.0, 1: 0.3})
    assert late_ms(state, 10.0 + OLD_S) == {1: 400}
    assert late_ms(state, 11.0 + OLD_S) == {}


def test_ranks_behind_sums_within_nodes_are_not_watched() -> None:
    state = ServerState(0, 2, 1, 1)
    option = ("intra.reduce", "inter.push", "inter.pull", "intra.broadcast")
    layout = replace(LAYOUT, buckets=tuple(replace(bucket, option=option, keys=bucket.parts) for bucket in LAYOUT.buckets))
    state.register(layout, *specs_of(layout, 0, 2))
    assert not any(entry.waits for entry in state.keys.values())
    state, _ = serves(2)
    assert [entry.waits is not None and entry.waits.last for entry in state.keys.values()] == [False, True]


# when the scheduler says so


def test_the_scheduler_says_it_once_when_it_has_been_so_for_a_while() -> None:
    job = complete()
    lines: list[tuple[float, str]] = []

    def go(seconds: float, slow: bool) -> None:
        until = job.now + seconds
        while job.now < until:
            for rank in range(2):
                job.say(f"w{rank}", Kind.REPORT, worker(140, 0) if slow and rank else worker(40, 100))
                job.say(f"w{rank}", Kind.HEARTBEAT)
            job.say("s0", Kind.REPORT, server())
            job.say("s0", Kind.HEARTBEAT)
            job.now += 1.0
            lines.extend((job.now, action.text) for action in job.membership.tick(job.now) if "is slow" in getattr(action, "text", ""))

    go(30, slow=False)
    go(HOLD_S - 5, slow=True)
    go(10, slow=False)
    assert lines == [], "that was a pause"
    go(HOLD_S + 5, slow=True)
    assert [text for _, text in lines] == ["rank 1 is slow (compute): it computes for 140 ms of a step, 100 ms more than others"]
    go(60, slow=False)
    go(60, slow=True)
    assert len(lines) == 1, "it is known"
    go(AGAIN_S, slow=True)
    assert len(lines) == 2
