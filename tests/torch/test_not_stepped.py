"""Loops that do with averaged gradients what they like train as without psgc: skip guards, SAM, hand-written updates, statistics, closures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psgc.torch.gradients.skips import EXCEPTIONAL, FORGIVEN, IN_A_ROW, Skips
from psgc.torch.gradients.written import Written
from psgc.torch.state import saved
from tests.torch.job_not_stepped import FRONTS
from tests.torch.small_models import linear, sgd

JOB = str(Path(__file__).parent / "job_not_stepped.py")
# How many times as far from the definition as plain training a loop may be under a codec, whose error two gradients a step have twice. A loop whose first three
# results, or whose few skipped ones, take what codecs keep with them is a little further away.
TIMES = {"plain": 1, "averaged": 1, "twice": 1.2, "by_hand": 1.2, "by_hand_on_data": 1.2, "toggled": 4} | dict.fromkeys(
    (
        "guarded", "guarded_frozen", "guarded_first", "guarded_early", "guarded_and_saved", "guarded_against_nan", "clipped", "discarding", "accumulated",
        "rolled_back", "by_hand_guarded", "by_hand_on_data_guarded", "based_guarded", "set_by_hand",
    ), 3,
)  # fmt: skip
TWICE = 12
GAN = 40  # the discriminator's codec keeps, and sends later, what is left of gradients that were meant for the generator
CODECS = ("none", "int8", "onebit", "topk:k=0.1")
Case = dict[str, Any]


def said(make: Callable[..., Any], front: str, servers: int, codecs: tuple[str, ...]) -> list[Case]:
    """What the ranks said of each loop and codec; they must say the same."""
    texts = make(servers=servers, env={"PSGC_MIN_COMPRESS_BYTES": "0"}).said(front, *codecs, job=JOB)
    first, second = ([json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("front", "servers", "codecs"),
    [
        ("optimizer", 1, ("none", "int8")), ("optimizer", 0, ("none", "onebit")), ("hook", 1, ("none", "topk:k=0.1")),
        ("hook", 0, ("none", "int8")),
        *(pytest.param(front, servers, CODECS, marks=pytest.mark.long) for front in ("optimizer", "hook") for servers in (1, 0)),
    ],
)  # fmt: skip
def test_what_a_loop_does_with_its_gradients_is_its_own(
    make_job: Callable[..., Any], front: str, servers: int, codecs: tuple[str, ...]
) -> None:
    cases = said(make_job, front, servers, codecs)
    usual = {case["codec"]: case["apart"] for case in cases if case["loop"] == "plain"}
    assert sorted({case["loop"] for case in cases}) == sorted(FRONTS[front])
    assert len(cases) == len(FRONTS[front]) * len(usual) == len(FRONTS[front]) * len(codecs)
    for case in cases:
        loop, (halfway, end) = case["loop"], case["apart"]
        assert case["skipped"] == case["wanted"], case
        assert bool(case["wanted"]) == ("guarded" in loop or loop in ("clipped", "discarding", "accumulated", "rolled_back", "set_by_hand"))
        if case["codec"] == "none":
            assert max(halfway, end) <= 1e-5, case
        elif loop == "gan":
            assert all(apart <= GAN * of_plain for apart, of_plain in zip(case["apart"], usual[case["codec"]], strict=True)), case
        elif loop != "lbfgs":  # its next direction is made of what two noisy gradients differ by
            times = TIMES.get(loop, TWICE)
            assert all(apart <= times * of_plain for apart, of_plain in zip(case["apart"], usual[case["codec"]], strict=True)), case
            assert end <= 1.1 * halfway, f"it grows with the steps: {case}"


def test_a_result_without_a_step_is_an_exception_among_the_first_and_among_many_steps_only() -> None:
    guard, gan, critic, by_hand = Skips(), Skips(), Skips(), Skips()
    for step in range(50):
        gan.step()
        assert gan.throw() == (step < FORGIVEN)
        assert not by_hand.use()
    assert by_hand.by_hand
    assert not gan.by_hand
    for skip in range(20):
        guard.step()
        assert guard.throw(), skip
        for _ in range(EXCEPTIONAL - 1):
            guard.step()
    found = []
    for _ in range(100):
        found.append(critic.throw())
        for _ in range(EXCEPTIONAL - 1):
            critic.step()
    assert not any(found[EXCEPTIONAL * FORGIVEN :]), "what comes regularly is no exception, after some time"


@pytest.mark.parametrize("plain", [0, 20, 1000, 10_000])
def test_what_a_script_did_long_ago_says_nothing_of_what_it_does_now(plain: int) -> None:
    """Plain training, then SAM or a GAN: each iteration leaves a result. Then plain training again, with a guard."""
    skips = Skips()
    for _ in range(plain):
        skips.step()
    found = []
    for _ in range(100):
        skips.step()
        found.append(skips.throw())
    assert sum(found) <= EXCEPTIONAL * IN_A_ROW // (EXCEPTIONAL - 1)
    assert found == sorted(found, reverse=True), "once it leaves results regularly, none is an exception"
    for _ in range(EXCEPTIONAL * (FORGIVEN + 1)):
        skips.step()
    assert skips.throw()


def test_many_bad_batches_in_a_row_are_exceptions_after_many_steps() -> None:
    skips = Skips()
    for _ in range(1000):
        skips.step()
    assert [skips.throw() for _ in range(IN_A_ROW + 1)] == [True] * IN_A_ROW + [False]


def test_bad_batches_before_anything_was_applied_are_exceptions() -> None:
    skips = Skips()
    assert [skips.throw() for _ in range(IN_A_ROW + 1)] == [True] * IN_A_ROW + [False]


def test_updates_by_hand_are_steps_of_which_bad_batches_are_exceptions() -> None:
    skips = Skips()
    for _ in range(20):
        assert not skips.use()
    assert skips.throw()


def test_a_result_after_which_parameters_are_loaded_is_an_exception_among_steps_and_one_that_sam_climbs_with_is_none() -> None:
    rolled_back, sam = Skips(), Skips()
    for _ in range(20):
        rolled_back.step()
        assert not sam.use()
        sam.step()
    assert rolled_back.use()
    assert not sam.by_hand


def test_counts_of_an_earlier_version_go_on_as_what_they_were_there() -> None:
    gan = Skips.of({"applied": 40, "left": 40, "credit": -EXCEPTIONAL})
    assert (gan.applied, gan.thrown, gan.used) == (40, 40, 0)
    gan.step()
    assert not gan.throw(), "what comes regularly is no exception"
    guard = Skips.of({"applied": 1000, "left": 2, "credit": EXCEPTIONAL * IN_A_ROW})
    assert guard.throw() and guard.use()
    by_hand = Skips.of({"applied": 0, "left": 1000, "credit": -EXCEPTIONAL * FORGIVEN})
    assert by_hand.by_hand and by_hand.used == 1000
    assert not by_hand.use(), "a script that never steps uses its results"
    assert Skips.of({"applied": 0, "left": 0, "credit": EXCEPTIONAL * FORGIVEN}) == Skips.of({}) == Skips()
    now = Skips(7, 2, 1, 9, -3)
    assert Skips.of(now.state()) == Skips.of({**now.state(), "of_a_later_version": 1}) == now


@pytest.mark.parametrize(
    ("skips", "thrown"), [({"applied": 4, "left": 3, "credit": 5}, 3), ({}, 0), ({"applied": 4, "thrown": 1, "more": 2}, 1)]
)
def test_states_of_other_versions_are_read_with_the_counts_that_they_have(alone: None, skips: dict[str, int], thrown: int) -> None:
    optimizer: Any = sgd(linear())
    state = optimizer.residual_state_dict()
    assert state["format"] == saved.FORMAT
    assert all(f'"{name}"' in str(saved.__doc__) for name in state["skips"])
    optimizer.load_residual_state_dict({**state, "skips": skips})
    counts = optimizer.residual_state_dict()["skips"]
    assert (counts["applied"], counts["thrown"]) == (skips.get("applied", 0), thrown)


def parameters() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.randn(numel)) for numel in (7, 4097, 1)]


def test_writes_count_as_updates_whether_torch_counts_them_or_not() -> None:
    for write in (lambda p: p.sub_(0.1), lambda p: p.data.sub_(0.1)):
        own = parameters()
        written = Written(lambda own=own: own)
        for _ in range(3):
            written.note()
            assert not written.since()
            with torch.no_grad():
                write(own[1])
            assert written.since()


def test_a_step_that_writes_nothing_has_applied_nothing_unless_its_writes_are_never_counted() -> None:
    own = parameters()
    written, uncounted = Written(lambda: own), Written(lambda: own)
    sgd = torch.optim.SGD(own, lr=0.1)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    for applies in (True, False, True):
        written.note()
        if applies:
            sgd.step()
        assert written.by_step() == applies
    for _ in range(2):
        uncounted.note()
        own[1].data.sub_(0.1)
        assert uncounted.by_step()
