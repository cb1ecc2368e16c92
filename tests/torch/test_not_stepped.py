"""Loops that do with averaged gradients what they like train as without psgc: skip guards, SAM, hand-written updates, statistics, closures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.torch.gradients.skips import EXCEPTIONAL, Skips

JOB = str(Path(__file__).parent / "job_not_stepped.py")
# How many times as far from the definition as plain training a loop may be under a codec, whose error two gradients a step have twice.
TIMES = {"plain": 1, "by_hand": 1.2, "guarded": 3, "guarded_against_nan": 3, "toggled": 4}
TWICE = 10
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
        ("optimizer", 1, ("none", "int8", "topk:k=0.1")), ("optimizer", 0, ("none", "onebit")), ("hook", 1, ("none", "topk:k=0.1")),
        *(pytest.param(front, servers, CODECS, marks=pytest.mark.long) for front, servers in (("optimizer", 1), ("optimizer", 0), ("hook", 1))),
    ],
)  # fmt: skip
def test_what_a_loop_does_with_its_gradients_is_its_own(
    make_job: Callable[..., Any], front: str, servers: int, codecs: tuple[str, ...]
) -> None:
    cases = said(make_job, front, servers, codecs)
    usual = {case["codec"]: case["apart"] for case in cases if case["loop"] == "plain"}
    assert len(cases) == 9 * len(usual) == 9 * len(codecs)
    for case in cases:
        assert case["skipped"] == case["wanted"], case
        assert case["wanted"] == case["loop"].startswith("guarded")
        if case["codec"] == "none":
            assert max(case["apart"]) <= 1e-5, case
        elif case["loop"] != "lbfgs":  # its next direction is made of what two noisy gradients differ by
            times = TIMES.get(case["loop"], TWICE)
            assert all(apart <= times * of_plain for apart, of_plain in zip(case["apart"], usual[case["codec"]], strict=True)), case
            assert case["apart"][1] <= case["apart"][0], f"it grows with the steps: {case}"


def test_a_result_without_a_step_is_an_exception_among_many_steps_only() -> None:
    guard, gan, critic = Skips(), Skips(), Skips()
    for _ in range(EXCEPTIONAL):
        assert not gan.leave()
        gan.step()
        guard.step()
    assert guard.leave()
    assert not guard.leave()
    for _ in range(20):
        for _ in range(EXCEPTIONAL - 1):
            critic.step()
        assert not critic.leave()
