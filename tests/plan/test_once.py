"""A process searches each question once: problems whose search reads the same have one answer, which is the search's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.estimates import with_codec_times
from psgc.plan.inputs.profile import Profile, TensorProfile
from psgc.plan.methods import once
from psgc.plan.methods.once import search_once
from psgc.plan.methods.search import search
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, codec_costs
from tests.plan.commands import quick_search

TENSORS = tuple(TensorProfile(f"t{number}", 100_000 * (1 + number % 3), 500.0 * number) for number in range(9))
PROFILE = with_codec_times(Profile("m", TENSORS, device="cuda"), ["int8", "onebit"], memory_gbps=900.0).profile
CLUSTER = Cluster("four", 4, 2, Link(100, 5), Link(1, 20), collectives="nccl")


def problem(codec: str, constraints: Constraints) -> Problem:
    return Problem(PROFILE, CLUSTER, codec_costs(codec, PROFILE, CLUSTER.gpus), constraints)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_answers", type(once._answers)(maxlen=once.REMEMBERED))


def test_a_question_that_was_asked_is_not_searched_again() -> None:
    with quick_search("plan"):
        asked = problem("int8", Constraints(servers=True))
        found = search_once(asked)
        assert search_once(problem("int8", Constraints())) is found, "the cluster has no servers"
        assert (found.buckets, found.step_us) == (search(asked).buckets, search(asked).step_us)


def test_uncompressed_plans_are_one_question_whatever_the_codec() -> None:
    with quick_search("plan"):
        of_none, of_int8 = problem("none", Constraints()), problem("int8", Constraints(devices=(), servers=True))
        found = search_once(of_none)
        assert search_once(of_int8) is found
        assert search(of_int8).buckets == found.buckets


@pytest.mark.parametrize(
    "other",
    [
        problem("onebit", Constraints()),
        problem("int8", Constraints(most_encodes=1)),
        problem("int8", Constraints(runtime=True)),
        replace(problem("int8", Constraints()), cluster=replace(CLUSTER, inter=Link(2, 20))),
        replace(problem("int8", Constraints()), profile=replace(PROFILE, tensors=TENSORS[:5])),
        replace(problem("int8", Constraints()), others=(("t1", codec_costs("onebit", PROFILE, 8)),)),
    ],
)
def test_whatever_a_search_reads_makes_another_question(other: Problem) -> None:
    with quick_search("plan"):
        first, found = search_once(problem("int8", Constraints())), search_once(other)
        assert found is not first
        assert found.buckets == search(other).buckets
