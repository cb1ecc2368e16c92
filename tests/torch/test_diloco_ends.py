"""How DiLoCo begins and ends with users: the mean at the end is one, whoever forgets something is told, and what cannot be meant is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError

Make = Callable[..., Any]


def texts(make_job: Make, *arguments: str, **env: str) -> list[str]:
    found: list[str] = make_job(nodes=2, servers=1).said(*arguments, job="diloco_ends.py", PSGC_MIN_COMPRESS_BYTES="0", **env)
    return found


def ended(text: str) -> str:
    """A digest of the parameters at the end."""
    (found,) = (line.removeprefix("ended: ") for line in text.splitlines() if line.startswith("ended: "))
    return found


def test_finish_leaves_the_mean_whatever_the_codec_drops_and_no_residual_changed(make_job: Make) -> None:
    """And a second one at once changes nothing."""
    first, second = texts(make_job, "mean")
    told = {words[1]: words[2].split() for line in first.splitlines() if (words := line.split(": "))[0] == "mean"}
    assert set(told) >= {"none workers", "int4 workers", "topk:k=0.01 workers", "sparseloco workers", "topk:k=0.01 servers"}
    for name, (off, same, twice, digest) in told.items():
        assert float(off) <= (1e-6 if name.startswith("none") else 0.005), f"{name}: {off} of the progress"
        assert (same, twice) == ("True", "True"), name
        assert digest in second, f"{name}: ranks have the same parameters"


def test_an_optimizer_beside_the_inner_one_may_step_last(make_job: Make) -> None:
    first, second = texts(make_job, "two")
    assert ended(first) == ended(second)


def test_steps_beyond_the_last_exchange_may_differ(make_job: Make) -> None:
    first, second = texts(make_job, "uneven")
    assert ended(first) == ended(second), "after 10 and 9 steps, with an exchange in every fourth"


def test_who_forgets_to_finish_is_told_and_lines_count_exchanges(make_job: Make) -> None:
    first, _ = texts(make_job, "unfinished")
    assert (
        "diloco0: ranks end with different parameters: what each has done since the last exchange is its own; leave its block, or call finish()"
        in first
    )
    assert first.count("once in 4 steps, ") == 2, "each fragment's line"
    assert "5 exchanges in 11 steps, " in first, "of two fragments, after steps 2, 4, 6, 8 and 10"


def test_who_has_saved_a_state_to_go_on_from_has_forgotten_nothing(make_job: Make) -> None:
    first, _ = texts(make_job, "saved")
    assert "5 exchanges in 11 steps, " in first and "different parameters" not in first


@pytest.mark.parametrize("how", ["never-stepped", "never-stepped-block"])
def test_an_inner_optimizer_that_never_steps_is_told_of(make_job: Make, how: str) -> None:
    first, second = texts(make_job, how)
    assert first.count("diloco0: the step() of its inner optimizer was never called, so that nothing was exchanged") == 1
    if how.endswith("block"):
        assert ended(first) == ended(second), "they end with the mean all the same"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("ddp", "torch's DistributedDataParallel averages the gradient of 'module.0.weight' over all ranks in every step"),
        ("own-ddp", "psgc (model0) averages the gradient of"),
        ("optimizer", "psgc (optimizer0) averages the gradient of '0.weight' over all ranks in every step"),
        ("later", "psgc (optimizer0) averages the gradient of '0.weight' over all ranks in every step"),
        ("site", ""),
    ],
)
def test_a_model_whose_gradients_all_ranks_average_in_every_step_is_refused(make_job: Make, how: str, text: str) -> None:
    """Within a site it may be."""
    for said in texts(make_job, how):
        assert f"refused: DiLoCo: {text}" in said if text else "trained 5" in said


def diloco(outer: Any = "nesterov:lr=0.7,momentum=0.9", width: int = 5, on: Any = "workers") -> psgc.DiLoCo:
    own = nn.Linear(1, width)
    return psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, outer=outer, on=on)


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_a_state_of_other_shapes_is_refused_before_anything_is_written(alone: None, on: Any) -> None:
    outside = diloco(on=on)
    before = outside.state_dict()
    with pytest.raises(UsageError, match=r"'weight' has shape \[1, 1\] in the state, and \[5, 1\] here"):
        outside.load_state_dict(diloco(width=1, on=on).state_dict())
    after = outside.state_dict()
    assert all(torch.equal(before["fragments"][0]["outer"][name], after["fragments"][0]["outer"][name]) for name in ("weight", "bias"))
    with pytest.raises(UsageError, match="this is no state of a DiLoCo's state_dict"):
        outside.load_state_dict({})


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_a_state_of_a_job_of_another_size_is_refused_before_anything_is_written(alone: None, on: Any) -> None:
    outside, other = diloco(on=on), diloco(on=on)
    for _ in range(3):
        other.step()
    before, state = outside.state_dict(), other.state_dict()
    (state["residuals"] if on == "workers" else state["fragments"][0]["held"])["size"] = 2
    text = r"DiLoCo.load_state_dict: this is rank 0 of 1, and the state is rank 0's of 2; every rank loads what it has saved itself"
    with pytest.raises(UsageError, match=text):
        outside.load_state_dict(state)
    after = outside.state_dict()
    assert after["steps"] == before["steps"] == 0
    assert all(torch.equal(before["fragments"][0]["outer"][name], after["fragments"][0]["outer"][name]) for name in ("weight", "bias"))


def test_the_outer_rule_is_that_which_was_asked_for_and_its_momentum_the_states(alone: None) -> None:
    other = diloco()
    for _ in range(2):
        for parameter in other.inner.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()
    outside = diloco("nesterov:lr=0.1,momentum=0.5")
    outside.load_state_dict(other.state_dict())
    (kept,) = (fragment["optimizer"] for fragment in outside.state_dict()["fragments"])
    assert (kept["param_groups"][0]["lr"], kept["param_groups"][0]["momentum"]) == (0.1, 0.5)
    assert kept["state"][0]["momentum_buffer"].abs().sum() > 0
    with pytest.raises(UsageError, match="the state's outer optimizer is Adam, and this one's is SGD; make it with the same outer"):
        outside.load_state_dict(diloco(lambda tensors: torch.optim.Adam(tensors, lr=1e-3)).state_dict())


def test_what_is_no_model_no_optimizer_and_no_outer_step_is_told(alone: None) -> None:
    own = nn.Linear(1, 5)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    for arguments, more, text in (
        ((inner, own), {}, r"the model is a SGD, expected a torch.nn.Module: DiLoCo\(model, inner, every=...\)"),
        ((own, own), {}, "the inner optimizer is a Linear, expected one of torch's kind"),
        ((own, inner), {"outer": inner}, 'outer is a SGD: expected text such as "average", or a function'),
    ):
        with pytest.raises(UsageError, match=text):
            psgc.DiLoCo(*arguments, every=10, **more)  # type: ignore[arg-type]
