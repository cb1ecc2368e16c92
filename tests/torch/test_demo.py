"""DeMo: what the published algorithm makes of all ranks' gradients, over servers and alone; its state; and what does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.codecs import parse_scheme
from psgc.errors import NonFiniteError, PsgcError, UsageError
from psgc.torch.optimizers.demo import from_squares, squares_of, to_squares


def test_ranks_take_the_published_steps_and_go_on_from_their_states(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=2, servers=2).said(job="demo_optimizer.py")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts]
    for name in ("whole", "resumed"):
        (digest, off, first, last), other = told[0][name], told[1][name]
        assert digest == other[0], f"{name}: ranks end with the same parameters"
        assert float(off) < 0.002, f"{name}: {off} of the parameters took another step than the loop's"
        assert float(last) < float(first)
    assert told[0]["whole"][0] == told[0]["resumed"][0], "momenta are part of what is saved"
    assert all("infinity True" in text for text in texts), "of one rank, and all ranks' parameters say so"
    twice = "averages the gradient of '0.weight' over all ranks in every step, so that DeMo would save nothing"
    for text in texts:
        lines = [line for line in text.splitlines() if line.startswith("refused: DeMo: ")]
        assert [f"{who} {twice}" in line for who, line in zip(("psgc (model0)", "DistributedDataParallel"), lines, strict=True)] == [
            True
        ] * 2


def test_a_job_without_servers_is_told_in_a_line(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=0)
    job.whole(job="demo_optimizer.py")
    job.end()
    assert "DeMo: servers relay what ranks send, and this job has none" in job.text()


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (4097,), (3, 5), (64, 64), (65, 130), (7, 3, 3, 3), (200, 1)])
def test_parameters_lie_in_squares_and_come_back(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = torch.full((squares_of(values),), float("nan"))
    to_squares(values, flat)
    assert flat.numel() % 4096 == 0 and torch.equal(from_squares(flat, values), values)
    assert flat.abs().sum().item() == pytest.approx(values.abs().sum().item(), rel=1e-5), "the rest is zeros"
    if shape == (65, 130):
        assert torch.equal(flat[4096 : 2 * 4096].view(64, 64), values[:64, 64:128]), "squares are the matrix's own"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))


def test_alone_it_is_the_same_algorithm(alone: None) -> None:
    own = model()
    optimizer = psgc.DeMo(own.named_parameters(), lr=0.01, decay=0.5, k=4096)  # everything is sent: signs of the gradients
    own(torch.ones(1, 8)).sum().backward()
    before = [parameter.detach().clone() for parameter in own.parameters()]
    signs = [parameter.grad.sign() for parameter in own.parameters() if parameter.grad is not None]
    optimizer.step()
    for was, now, sign in zip(before, own.parameters(), signs, strict=True):
        torch.testing.assert_close(now.detach(), was - 0.01 * sign)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_alone_what_is_not_finite_reaches_the_parameter_as_in_a_job(alone: None, bad: float) -> None:
    wrong, right = (nn.Parameter(torch.ones(3, 5)) for _ in range(2))
    optimizer = psgc.DeMo([("wrong", wrong), ("right", right)], lr=0.1)
    wrong.grad, right.grad = torch.ones(3, 5), torch.ones(3, 5)
    optimizer.step()
    momentum = optimizer._alone[0].residual.copy()
    wrong.grad[1, 2] = bad
    optimizer.step()
    assert wrong.isnan().all() and right.isfinite().all()
    assert (optimizer._alone[0].residual == momentum).all()


def test_alone_what_is_not_finite_is_refused_where_that_is_asked_for(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = psgc.DeMo([("w", parameter)], lr=0.1)
    monkeypatch.setattr(optimizer._session, "config", replace(optimizer._session.config, nonfinite="raise"))
    parameter.grad = torch.full((3, 5), float("inf"))
    with pytest.raises(NonFiniteError, match=r"DeMo: the gradient of 'w' on rank 0 holds NaN or infinity \(PSGC_NONFINITE=raise\)"):
        optimizer.step()
    assert (parameter == 1).all()


def test_alone_momenta_are_saved_and_a_closure_is_run(alone: None) -> None:
    found = []
    for resumed in (False, True):
        own = model()
        optimizer = psgc.DeMo(own.named_parameters(), lr=0.01, k=1, weight_decay=0.1)
        draw = torch.Generator().manual_seed(0)
        for step in range(6):
            if resumed and step == 3:
                state = optimizer.state_dict()
                optimizer = psgc.DeMo(own.named_parameters(), lr=0.5, k=1)
                optimizer.load_state_dict(state)
            x = torch.randn(4, 8, generator=draw)

            def closure() -> torch.Tensor:
                own.zero_grad()  # noqa: B023 - called at once, as the next line
                loss = own(x).square().sum()  # noqa: B023
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        found.append([parameter.detach().clone() for parameter in own.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"decay": 1.5}, "decay from 0 to 1"),
        ({"decay": None}, "decay from 0 to 1"),
        ({"k": 0}, "whole number from 1 to 4096"),
        ({"k": 32.5}, "k as a whole number"),
        ({"k": "32"}, "k as a whole number"),
        ({"k": 10**400}, "k as a whole number"),
        ({"k": float("nan")}, "k as a whole number"),
        ({"lr": -1.0}, "lr and weight_decay of at least 0"),
        ({"lr": float("nan")}, "lr and weight_decay of at least 0 and finite"),
        ({"lr": float("inf")}, "lr and weight_decay of at least 0 and finite"),
        ({"weight_decay": float("nan")}, "lr and weight_decay of at least 0 and finite"),
    ],
)
def test_numbers_that_do_not_fit_are_told(alone: None, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=r".*") as raised:
        psgc.DeMo(model().named_parameters(), **settings)
    assert text in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_sixteen_bits_round_away_add_up(alone: None, dtype: torch.dtype) -> None:
    """At 1 bfloat16 has no value that is nearer than 0.004 below, and float16 none within 0.0005."""
    lr, steps = (1e-3, 50) if dtype == torch.bfloat16 else (1e-4, 50)
    ends = []
    for resumed in (False, True):
        narrow, wide = nn.Parameter(torch.ones(64, 64, dtype=dtype)), nn.Parameter(torch.ones(64, 64))
        optimizer = psgc.DeMo([("narrow", narrow), ("wide", wide)], lr=lr, k=4096, weight_decay=0.1)
        for step in range(steps):
            if resumed and step == 3:  # what three steps added up to is in no parameter yet
                state = optimizer.state_dict()
                optimizer = psgc.DeMo([("narrow", narrow), ("wide", wide)], lr=0.5, k=4096)
                optimizer.load_state_dict(state)
            narrow.grad, wide.grad = torch.ones_like(narrow), torch.ones_like(wide)
            optimizer.step()
        assert torch.equal(narrow, wide.to(dtype)) and (narrow < 1).all()
        ends.append(narrow.detach().clone())
    assert torch.equal(*ends)


def test_a_narrow_parameter_that_is_written_by_others_goes_on_from_there(alone: None) -> None:
    parameter = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    optimizer = psgc.DeMo([("w", parameter)], lr=1e-3, k=4096)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        parameter[:35] = 8.0
    optimizer.step()
    master = optimizer.state[parameter]["master"]
    torch.testing.assert_close(master, torch.cat([torch.full((35,), 8.0 - 1e-3), torch.full((35,), 1.0 - 2e-3)]))
    assert (parameter[:35] == 8).all()


def test_numbers_of_other_types_are_taken(alone: None) -> None:
    moved = []
    for settings in ({"decay": 0.5, "k": 32}, {"decay": np.float64(0.5), "k": 32.0}, {"decay": np.float32(0.5), "k": np.int64(32)}):
        own = model()
        optimizer = psgc.DeMo(own.named_parameters(), **settings)  # type: ignore[arg-type]
        own(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        moved.append([parameter.detach().clone() for parameter in own.parameters()])
    for others in moved[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(moved[0], others, strict=True))


def test_a_parameter_without_elements_is_left_out(alone: None) -> None:
    full, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 4))
    optimizer = psgc.DeMo([("empty", empty), ("full", full)], lr=0.5, k=4096)
    full.grad, empty.grad = torch.ones(3), torch.ones(0, 4)
    optimizer.step()
    assert (full == 0.5).all()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_sparse_gradient_is_told_before_anything_moves(alone: None) -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Embedding(10, 4, sparse=True))
    optimizer = psgc.DeMo(layer.named_parameters())
    before = layer[0].weight.detach().clone()
    (layer[0](torch.ones(1, 2)).sum() + layer[1](torch.tensor([1, 2])).sum()).backward()
    with pytest.raises(UsageError, match=r"DeMo: the gradient of '1.weight' is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(layer[0].weight, before) and not optimizer._alone[0].residual.any()


def test_a_state_that_is_refused_changes_nothing(alone: None) -> None:
    state = psgc.DeMo(model().named_parameters(), lr=0.25).state_dict()
    optimizer = psgc.DeMo(nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 2)).named_parameters(), lr=0.5)
    with pytest.raises(PsgcError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_is_no_model_is_told(alone: None) -> None:
    with pytest.raises(UsageError, match=r"expected model.named_parameters"):
        psgc.DeMo(model().parameters())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameters that require"):
        psgc.DeMo([])
    with pytest.raises(UsageError, match=r"is torch.float64"):
        psgc.DeMo(model().double().named_parameters())
    optimizer = psgc.DeMo(model().named_parameters())
    with pytest.raises(UsageError, match="the state has no momentum"):
        optimizer.load_state_dict(torch.optim.SGD(model().parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize(
    ("wrap", "by"),
    [
        (lambda own, optimizer: psgc.DistributedOptimizer(optimizer, own.named_parameters()), "DistributedOptimizer"),
        (psgc.CrossBarrier, "CrossBarrier"),
        (lambda own, optimizer: psgc.DiLoCo(own, optimizer, every=2), "DiLoCo"),
    ],
)
def test_nothing_averages_what_it_exchanges_by_itself(alone: None, wrap: Callable[..., Any], by: str) -> None:
    own = model()
    with pytest.raises(UsageError, match=f"{by}: DeMo exchanges by itself; use it as it is"):
        wrap(own, psgc.DeMo(own.named_parameters()))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"PSGC_PLAN": "auto"}, "DeMo sends momenta by a codec of its own, not by PSGC_PLAN=auto; run it without"),
        ({"PSGC_ASYNC": "1"}, "PSGC_ASYNC=1 (BYTEPS_ENABLE_ASYNC) asks for asynchronous training, which DistributedOptimizer does"),
    ],
)
def test_what_is_asked_for_in_vain_is_told(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, settings: dict[str, str], text: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    request.getfixturevalue("alone")
    with pytest.raises(UsageError) as raised:
        psgc.DeMo(model().named_parameters())
    assert text in str(raised.value)


FIRST_STEP = """
import sys, torch
import psgc.torch as psgc
from psgc.codecs.kit import cpu

made, kernel = [], cpu.kernel
cpu.kernel = lambda signature: lambda function: made.append(function.__name__) or kernel(signature)(function)
layer = torch.nn.Linear(100, 70)
psgc.init()
optimizer = psgc.DeMo(layer.named_parameters())
print(len(made), "kernels before the first step")
modules = set(sys.modules)
made.clear()
layer(torch.ones(3, 100)).sum().backward()
optimizer.step()
print("then", made, sorted(name for name in set(sys.modules) - modules if name.startswith("psgc.codecs")))
"""


def test_kernels_are_loaded_before_the_first_step() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_STEP], check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, then = ran.stdout.splitlines()
    assert int(first.split()[0]) > 3 and then == "then [] []"


def test_parameters_are_given_at_once_and_one_that_is_frozen_later_stays(alone: None) -> None:
    own = model()
    optimizer = psgc.DeMo(own.named_parameters(), lr=0.01, weight_decay=0.1)
    with pytest.raises(UsageError, match=r"DeMo.add_param_group: its parameters are given at once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    own(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    frozen = own[0].weight.requires_grad_(False)
    before, moves = frozen.detach().clone(), own[1].weight.detach().clone()
    optimizer.zero_grad()
    own(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(frozen, before) and not torch.equal(own[1].weight, moves)


def test_one_that_was_frozen_before_and_is_trained_later_is_told_before_anything_moves(alone: None) -> None:
    own = model()
    thawed = own[0].weight.requires_grad_(False)
    optimizer = psgc.DeMo(own.named_parameters(), lr=0.01)
    own(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    thawed.requires_grad_(True)
    before = [parameter.detach().clone() for parameter in own.parameters()]
    own(torch.ones(1, 8)).sum().backward()
    with pytest.raises(
        UsageError, match=r"'0.weight' is trained now, and was frozen when DeMo was made.*; freeze it after DeMo is made, or"
    ):
        optimizer.step()
    assert all(torch.equal(was, now) for was, now in zip(before, own.parameters(), strict=True))
    again = psgc.DeMo(own.named_parameters(), lr=0.01)
    thawed.requires_grad_(False)
    for trained in (False, True):  # as the message says
        again.zero_grad()
        thawed.requires_grad_(trained)
        own(torch.ones(1, 8)).sum().backward()
        again.step()
        assert torch.equal(before[0], thawed) != trained


@pytest.mark.parametrize("beta", ["0.9999999", "0.95", "0.5", "1"])
@pytest.mark.parametrize("name", ["demo", "sparseloco"])
def test_the_canonical_text_keeps_all_of_a_share(name: str, beta: str) -> None:
    scheme = parse_scheme(f"{name}:beta={beta}")
    assert parse_scheme(scheme.canonical).beta == scheme.beta == float(beta)  # type: ignore[attr-defined]
