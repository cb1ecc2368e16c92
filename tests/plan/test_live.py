"""``auto``, without a job: when it plans, what it tries and keeps, and what it predicts from what was measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.live.levels import FINE, all_candidates, candidates, stage_of
from psgc.plan.live.outlook import MOST_GBPS, PLAN, Machines, fitted_gbps, loss_of_name, outlook, with_costs
from psgc.plan.live.steering import CALM, CHECKS, MOST_RECHECK, MOST_SWITCHES, QUICKER_WINDOWS, REFILL, ROUND, TRIAL_STEPS, WINDOW, Steering
from psgc.plan.model.level import EXACT, FAST, SAFE, asks_auto, level_of
from psgc.plan.model.options import over_groups
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN, check_runs
from psgc.torch.plans.calibrating import within_node_gbps

CODECS = (*FINE, "onebit", "topk")
MACHINES = Machines(nodes=2, workers_per_node=1, servers=1, cores=2)
NAMES = [f"t{n}" for n in range(8)]
NUMEL = 1 << 20


def curve(ns_per_element: float) -> dict[str, CostCurve]:
    one = CostCurve((float(NUMEL),), (ns_per_element * NUMEL / 1e3,), (ns_per_element * NUMEL / 1e3,))
    return {"cpu": one, "server": one}


def profile(ns_per_element: float = 1.0) -> Profile:
    tensors = tuple(TensorProfile(name, NUMEL, 2000.0 * number) for number, name in enumerate(NAMES))
    return Profile("m", tensors, forward_us=10_000.0, codecs={codec: curve(ns_per_element) for codec in CODECS})


def buckets(codec: str) -> tuple[PlannedBucket, ...]:
    option = PLAIN if codec == "none" else ENCODED
    return tuple(PlannedBucket((name,), NUMEL, 1, -number, codec, option) for number, name in enumerate(NAMES))


def losses(names: list[str]) -> list[float]:
    return [loss_of_name(name, None) for name in names]


def steer(steering: Steering, step_ms: float, candidates: list[str] | None = None) -> str:
    verdict = steering.window(step_ms)
    if verdict == "plan":
        assert candidates is not None, "it was not to plan"
        return steering.planned(losses(candidates))
    return verdict


def settle(steering: Steering, *steady_ms: float) -> None:
    """The trials to their end."""
    while not steering.over:
        steer(steering, steady_ms[steering.kept])


def test_candidates_are_tried_in_turn_and_the_quickest_is_kept() -> None:
    steering = Steering()
    assert steer(steering, 100.0, ["none", "onebit", "int8", "bf16"]) == "switch"
    assert [(steer(steering, ms), steering.kept) for ms in (90.0, 30.0, 80.0)] == [("switch", 2), ("switch", 3), ("switch", 2)]
    assert [(steer(steering, ms), steering.kept) for ms in (30.0, 100.0)] == [("switch", 0), ("switch", 2)], (
        "the first before it leaves once more"
    )
    assert steering.over
    assert steering.reference_ms == 30.0
    assert [steer(steering, ms) for ms in (31.0, 29.0, 36.0, 30.0)] == ["go on"] * 4


def test_it_plans_again_when_windows_in_a_row_depart_and_not_for_one() -> None:
    steering = Steering()
    steer(steering, 100.0, ["none", "int8"])
    settle(steering, 100.0, 40.0)
    assert [steer(steering, ms) for ms in (500.0, 40.0, 500.0)] == ["go on"] * 3
    assert steer(steering, 510.0, ["int8", "topk"]) == "switch"
    settle(steering, 510.0, 200.0)
    assert (steering.kept, steering.reference_ms) == (1, 200.0)


def test_noise_makes_it_neither_plan_nor_switch_and_plans_that_change_nothing_become_rare() -> None:
    numbers = random.Random(0)
    steering = Steering()
    steer(steering, 100.0, ["none"])
    assert all(steer(steering, steering.reference_ms * numbers.uniform(0.8, 1.2)) == "go on" for _ in range(10_000))
    plans = 0
    for window in range(2000):
        if steering.window(100.0 if window // 40 % 2 else 300.0) == "plan":
            plans += 1
            steering.planned(losses(["none"]))
    assert plans <= 10
    assert steering.switches == 0


class Job:
    """A job whose link is fast and slow in turns, and what steering makes of it. Step times are predicted as they are."""

    TIMES = ({"none": 100.0, "int8": 115.0}, {"none": 300.0, "int8": 130.0})  # milliseconds, on the fast link and on the slow one

    def __init__(self) -> None:
        self.steering, self.choice, self.names = Steering(), "none", ["none"]
        self.rechecks = 0

    def window(self, slow: bool) -> None:
        ms = self.TIMES[slow][self.choice]
        verdict = self.steering.window(ms)
        if verdict == "plan":
            self.rechecks += self.steering.rechecks
            loses = loss_of_name(self.choice, None)
            paying = [name for name, other in self.TIMES[slow].items() if other <= (1.0 if loss_of_name(name, None) < loses else 0.95) * ms]
            paying += ["none"] if self.steering.tries_plain and "none" not in paying else []
            self.names = [self.choice, *(name for name in paying if name != self.choice)]
            verdict = self.steering.planned(losses(self.names), cost_ms=20.0)
        if verdict == "switch":
            self.choice = self.names[self.steering.kept]

    def share_right(self, windows: int, period: int) -> float:
        """The share of windows in which the job had what is quickest."""
        right = 0
        for number in range(windows):
            slow = number // period % 2 == 1
            self.window(slow)
            right += self.choice == min(self.TIMES[slow], key=lambda name: self.TIMES[slow][name])
        return right / windows


def test_a_job_of_days_follows_its_link_at_the_100th_change_as_at_the_first() -> None:
    """A link that changes every 3,000 steps: more changes than a job may save up switches for."""
    job = Job()
    assert job.share_right(100 * 600, 600) > 0.98
    assert job.steering.switches > 3 * MOST_SWITCHES
    assert job.steering.allowance >= MOST_SWITCHES - ROUND


def test_a_link_that_flaps_is_not_followed_but_one_that_then_stays_is() -> None:
    job = Job()
    job.share_right(6000, 30)
    assert job.steering.switches < 6000 / REFILL
    before = job.steering.switches
    job.share_right(600, 30)
    assert job.steering.switches - before <= ROUND, "it waits for longer, the more often it changes"
    for slow in (True, False, True):
        for _ in range(20 * CALM):
            job.window(slow)
        assert job.choice == ("int8" if slow else "none")


def test_switches_are_used_up_and_come_back() -> None:
    """After every round of trials the job changes for good, and the new candidate is quicker: nothing else would end the switching."""
    steering, level, was_over, counts = Steering(), 100.0, False, []
    for _ in range(400 * REFILL):
        level = 1000.0 - level if steering.over and not was_over else level
        was_over = steering.over
        if steering.window(level * (0.8 if steering.kept else 1.0)) == "plan":
            steering.planned(losses(["none", "bf16", "int8", "int4"]))
        counts.append(steering.switches)
        assert steering.allowance >= 0, "a round of trials is not begun that could not be ended"
    assert counts[-1] <= MOST_SWITCHES + 400
    assert counts[-1] > counts[len(counts) // 2] > MOST_SWITCHES, "they come back"


def test_a_link_that_becomes_a_little_faster_brings_the_uncompressed_job_back() -> None:
    """The step gets 12 % shorter, which is no departure: uncompressed it would be 23 % shorter."""
    job = Job()
    for _ in range(50):
        job.window(slow=True)
    assert job.choice == "int8"
    for _ in range(QUICKER_WINDOWS + 6):
        job.window(slow=False)
    assert (job.choice, job.rechecks) == ("none", 1)


def test_a_steady_job_tries_ever_more_seldom_to_do_without_compression_and_an_uncompressed_one_never() -> None:
    job = Job()
    for _ in range(20 * MOST_RECHECK):
        job.window(slow=True)
    assert job.choice == "int8"
    assert 8 <= job.rechecks <= 30
    assert job.steering.switches == 3 + 2 * job.rechecks
    job = Job()
    for _ in range(2000):
        job.window(slow=False)
    assert job.rechecks == job.steering.switches == 0


@pytest.mark.parametrize(("plain_ms", "cost_ms"), [(4.0, 1000.0), (100.0, 0.0)])
def test_what_rechecks_cost_is_a_small_share_of_the_jobs_time(plain_ms: float, cost_ms: float) -> None:
    """Steps of 2 ms, and a rank 0 that takes a second to predict, or an uncompressed step of 50 times the length."""
    steering, spent_ms, passed_ms, kept = Steering(), 0.0, 0.0, "none"
    names = ["none"]
    for _ in range(100_000):
        step_ms = 2.0 if kept == "int8" else plain_ms
        passed_ms += step_ms * WINDOW
        spent_ms += (step_ms - 2.0) * TRIAL_STEPS if steering.rechecks else 0.0
        verdict = steering.window(step_ms)
        if verdict == "plan":
            spent_ms += cost_ms * steering.rechecks
            names = [kept, "none" if steering.rechecks else "int8"]
            verdict = steering.planned(losses(names), cost_ms=cost_ms)
        kept = names[steering.kept] if verdict == "switch" else kept
    assert kept == "int8"
    assert 0 < spent_ms < 0.011 * passed_ms


def test_readiness_is_noted_only_in_windows_that_a_plan_may_be_made_of() -> None:
    """While it measures, after a departure, and when a recheck is due: in a steady job in hardly any."""
    steering = Steering()
    assert steering.noting
    steer(steering, 100.0, ["none", "int8"])
    settle(steering, 100.0, 40.0)
    noted = 0
    for _ in range(5000):
        noting = steering.noting
        noted += noting
        if steering.window(40.0) == "plan":
            assert noting, "it plans by what it has noted"
            steering.planned([0.1])
    assert 0 < noted < 50
    steering.window(100.0)
    assert steering.noting


def test_every_rank_that_is_fed_the_same_does_the_same() -> None:
    numbers = random.Random(1)
    ranks = [Steering() for _ in range(4)]
    for _ in range(500):
        ms, names = numbers.choice((50.0, 80.0, 300.0)), numbers.sample(CODECS, numbers.randint(1, 4))
        verdicts = {steering.window(ms) for steering in ranks}
        assert len(verdicts) == 1
        if verdicts == {"plan"}:
            assert len({steering.planned(losses(names)) for steering in ranks}) == 1
        assert len({steering.kept for steering in ranks}) == 1


def test_a_slow_links_rate_is_found_from_one_step_and_a_codec_is_worth_a_trial_there() -> None:
    wire_ms = 2 * 2 * 32 * 8 * NUMEL / 0.1e9 * 1e3 / 2  # of two workers, over one server's link, each way at once
    found = outlook(profile(), MACHINES, wire_ms, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=True)
    assert 0.05 < found.gbps < 0.2
    assert found.tried
    assert set(found.tried) <= {*CODECS, PLAN}
    assert found.predicted_ms["int8"] == pytest.approx(wire_ms / 4, rel=0.15)
    again = fitted_gbps(profile(), MACHINES, 1e3 * found.predicted_ms["int8"] - 10_000, buckets("int8"))
    assert again == pytest.approx(found.gbps, rel=0.01), "from any codec's steps the same rate is found"


def test_a_job_that_compresses_is_tried_uncompressed_where_that_is_asked_for_or_would_take_no_longer() -> None:
    """What a short step has beside the link looks like a slow link, over which nothing else would be predicted to be quicker."""
    layouts = {codec: buckets(codec) for codec in CODECS}
    for asked in (False, True):
        found = outlook(profile(), MACHINES, 120.0, buckets("int4"), layouts, "int4", plans=False, tries_plain=asked)
        assert found.predicted_ms["none"] > 300.0
        assert ("none" in found.tried) == asked
    slow = replace(profile(30.0), codecs={**profile(30.0).codecs, "none": curve(0.1)})  # but uncompressed
    at_best = outlook(slow, MACHINES, 24.0, buckets("int4"), layouts, "int4", plans=False).predicted_ms["none"]
    found = outlook(slow, MACHINES, 1.02 * at_best, buckets("int4"), layouts, "int4", plans=False)
    assert found.gbps == MOST_GBPS
    assert "none" in found.tried


def test_of_bf16_gradients_the_links_rate_is_not_taken_for_twice_what_it_is_and_bf16_is_no_gain() -> None:
    """By hand: the step is what the model gives for 2 bytes an element at 1 Gbit/s."""
    halves = profile().narrowed(2)
    cluster = MACHINES.cluster(1.0)
    problem = Problem(with_costs(halves), cluster, codec_costs("none", with_costs(halves), 2), MACHINES.constraints)
    step_us = simulate(problem, buckets("none")).step_us
    assert fitted_gbps(with_costs(halves), MACHINES, step_us, buckets("none")) == pytest.approx(1.0, rel=1e-3)
    as_if_floats = fitted_gbps(with_costs(profile()), MACHINES, step_us, buckets("none"))
    assert as_if_floats > 1.7, "a job of float32 gradients would have needed such links"
    layouts = {codec: buckets(codec) for codec in ("none", "bf16", "int8")}
    found = outlook(halves, MACHINES, (step_us + 10_000) / 1e3, buckets("none"), layouts, "none", plans=False)
    step_ms = (step_us + 10_000) / 1e3
    assert found.predicted_ms["bf16"] == pytest.approx(step_ms, rel=1e-3) and found.tried == ("int8",)
    assert outlook(profile(), MACHINES, step_ms, buckets("none"), layouts, "none", plans=False).predicted_ms["bf16"] < 0.6 * step_ms, (
        "which was said"
    )


def test_where_links_do_not_matter_nothing_is_tried() -> None:
    step_ms = (10_000 + 14_000) / 1e3
    found = outlook(profile(3.0), MACHINES, step_ms, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=False)
    assert found.gbps == MOST_GBPS
    assert found.tried == ()


@pytest.mark.parametrize("machines", [
    Machines(nodes=2, workers_per_node=2, servers=1, cores=2), Machines(nodes=2, workers_per_node=2, servers=0, cores=2),
    Machines(nodes=2, workers_per_node=1, servers=0, cores=2), Machines(nodes=3, workers_per_node=2, servers=2, cores=2, even=False),
])  # fmt: skip
def test_plans_are_of_all_that_such_a_job_runs(machines: Machines) -> None:
    of_host = replace(profile(), device="cpu")
    found = outlook(of_host, machines, 20_000.0, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=True)
    assert found.tried[0] == PLAN
    assert found.plan is not None
    check_runs(found.plan, "auto")
    for bucket in found.plan.buckets:
        assert machines.servers or over_groups(bucket.option)
        assert (machines.workers_per_node > 1) == any(action.startswith("intra.") for action in bucket.option)
    assert (found.plan.issue_order is None) != machines.even
    assert read_plan(found.plan.to_json(), "auto") == found.plan, "so that rank 0 can hand it out"


def test_of_gradients_on_gpus_plans_encode_there_and_move_payloads_through_the_hosts() -> None:
    """The GPU encodes in a twentieth of the CPU's time, and a gradient takes as long to be copied to the host as over the link."""
    known = {codec: {**curve(1.0), "gpu": curve(0.05)["cpu"]} for codec in CODECS}
    given = replace(profile(), device="cuda", codecs=known)
    for servers in (1, 0):
        machines = Machines(nodes=2, workers_per_node=2, servers=servers, cores=2, gpus=True, host=Link(1.0, 10.0))
        found = outlook(given, machines, 20_000.0, buckets("none"), {"bf16": buckets("bf16")}, "none", plans=True)
        assert found.plan is not None and found.tried[0] == PLAN
        check_runs(found.plan, "auto")
        actions = {action for bucket in found.plan.buckets for action in bucket.option}
        assert "comp@gpu" in actions and (servers or not any("push" in action for action in actions))
        assert machines.cluster(1.0).collectives == "host"


def test_where_gpus_are_connected_plans_have_payloads_go_from_one_to_the_other() -> None:
    """The link to the host is slow: through its memory a gradient would have to pass it."""
    known = {codec: {**curve(1.0), "gpu": curve(0.05)["cpu"]} for codec in CODECS}
    given = replace(profile(), device="cuda", codecs=known)
    machines = Machines(nodes=2, workers_per_node=2, servers=0, cores=2, gpus=True, host=Link(1.0, 10.0), connected=True)
    cluster = machines.cluster(0.5)
    assert (cluster.collectives, cluster.intra.gbps) == ("nccl", 1.0)
    by_nccl = outlook(given, machines, 20_000.0, buckets("none"), {"bf16": buckets("bf16")}, "none", plans=True)
    assert by_nccl.plan is not None and not any("@cpu" in action for bucket in by_nccl.plan.buckets for action in bucket.option)
    check_runs(by_nccl.plan, "auto")

    def step_us(of: Machines) -> float:
        return simulate(Problem(given, of.cluster(50.0), codec_costs("bf16", given, 4), of.constraints), plan.buckets).step_us

    plan = by_nccl.plan
    assert step_us(machines) < step_us(replace(machines, connected=False)), "nothing is copied to the host"


def test_sums_within_a_node_take_the_rate_that_its_memory_has() -> None:
    machines = Machines(nodes=2, workers_per_node=2, servers=1, cores=2, within_gbps=7.0)
    assert machines.cluster(1.0).intra.gbps == 7.0 and machines.cluster(10.0).intra.gbps == 10.0, "no less than the links have"
    one, two = within_node_gbps(2, 2), within_node_gbps(2, 1)
    assert two > 0 and 0 < one < 10_000


def test_more_that_may_be_tried_is_planned_for_after_the_next_window_and_noted_in_it() -> None:
    steering = Steering()
    steer(steering, 100.0, ["none"])
    assert not steering.noting
    steering.ask()
    assert steering.noting
    assert steer(steering, 100.0, ["none", "onebit"]) == "switch"
    settle(steering, 100.0, 30.0)
    assert steering.kept == 1
    assert steer(steering, 30.0) == "go on", "it was asked once"


def test_a_lossy_choice_is_looked_at_every_so_often_and_none_never() -> None:
    for plain_ms, looks in ((20.0, 0), (100.0, 5)):
        steering, found = Steering(), 0
        steer(steering, plain_ms, ["none", "int8"])
        while not steering.over:
            steer(steering, (plain_ms, 30.0)[steering.kept])
        for _ in range(5 * CHECKS):
            found += steering.checks
            steer(steering, min(plain_ms, 30.0))
        assert found == looks


def test_levels_say_which_codecs_are_tried_and_when() -> None:
    assert candidates(EXACT, 0, {"float32"}) == candidates(EXACT, 0, {"float32", "bfloat16"}) == ["none"]
    assert candidates(EXACT, 0, {"bfloat16"}) == ["none", "bf16"] and candidates(EXACT, 0, {"float16"}) == ["none", "fp16"]
    assert candidates(SAFE, stage_of(SAFE, 100_000)) == ["none", "bf16", "int8", "int4"]
    fast = [candidates(FAST, stage_of(FAST, steps)) for steps in (0, 99, 100, 250, 10**9)]
    assert fast[0] == fast[1] == candidates(SAFE, 0)
    assert "topk:k=0.0625" in fast[2] and "onebit" not in fast[2]
    assert fast[4][-2:] == ["onebit", "topk"] and set(all_candidates(FAST)) >= {codec for of in fast for codec in of}


@pytest.mark.parametrize(("text", "level"), [("auto", "safe"), ("auto:quality=fast", "fast"), ("auto:quality=exact", "exact")])
def test_a_level_may_stand_behind_auto(text: str, level: str) -> None:
    assert asks_auto(text) and level_of(text, "safe") == level


@pytest.mark.parametrize("text", ["auto:quality=best", "auto:fast", "auto:", "auto:quality="])
def test_an_unknown_level_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="auto takes one parameter, quality=exact, safe or fast"):
        level_of(text, "safe")
