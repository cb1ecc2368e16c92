"""DistributedOptimizer under a plan: its buckets are the plan's, what does not fit is refused by name, and the layout used is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import LayoutMismatch, PsgcError, UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.planfile.reading import load_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN
from psgc.torch.plans.choice import Choice, plan_for

MODEL = {"0.weight": 12, "0.bias": 4, "1.weight": 8, "1.bias": 2}


def planned(*buckets: tuple[tuple[str, ...], int], codec: str = "none", **sizes: int) -> dict[str, Any]:
    """A plan of (tensors, priority)."""
    numel = MODEL | sizes
    return {
        "version": 1, "model": "two layers", "cluster": "", "prediction": {},
        "buckets": [
            {"tensors": list(names), "numel": sum(numel[name] for name in names), "parts": 1, "priority": priority, "codec": codec,
             "option": list(PLAIN if codec == "none" else ENCODED)}
            for names, priority in buckets
        ],
    }  # fmt: skip


WHOLE = planned((("1.bias", "0.weight"), 3), (("0.bias",), 9), (("1.weight",), -2))


def written(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def build(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def train(rank: int, steps: int = 2, **options: Any) -> list[float]:
    model = build()
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean().backward()
        optimizer.step()
    return [x for p in model.parameters() for x in p.detach().reshape(-1).tolist()]


def test_gradients_travel_in_the_plans_buckets_and_come_to_the_same(ranks: Any, tmp_path: Path) -> None:
    plain = ranks.run(2, train)
    assert ranks.run(2, train, plan=written(tmp_path / "p", WHOLE)) == plain
    assert {(step.bucket, step.tensors) for step in ranks.steps} == {(0, ("0.bias",)), (1, ("1.bias", "0.weight")), (2, ("1.weight",))}
    assert ranks.run(2, train, fuse_bytes=0) == plain


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_a_plan_is_of_the_same_model_whatever_wrappers_are_in_it(ranks: Any, tmp_path: Path, wrapper: str) -> None:
    """torch.compile and torch's checkpoint_wrapper put themselves into names."""
    document = json.loads(json.dumps(WHOLE).replace("0.", f"0.{wrapper}."))
    assert "0.bias" not in json.dumps(document)
    plain = ranks.run(2, train)
    assert ranks.run(2, train, plan=written(tmp_path / "p", document)) == plain
    assert {(step.bucket, step.tensors) for step in ranks.steps} == {(0, ("0.bias",)), (1, ("1.bias", "0.weight")), (2, ("1.weight",))}


def test_the_layout_that_was_used_is_written_as_a_plan_which_gives_it_again(ranks: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    ranks.run(2, train, layout_out=str(first), fuse_bytes=60)
    steps = ranks.steps
    assert [set(bucket.tensors) for bucket in load_plan(str(first)).buckets] == [{"1.weight", "1.bias", "0.bias"}, {"0.weight"}]
    ranks.run(2, train, plan=str(first), layout_out=str(second))
    assert second.read_text() == first.read_text()
    assert sorted(step.tensors for step in ranks.steps) == sorted(step.tensors for step in steps)


def test_rank_0_says_which_nodes_inside_is_not_what_a_plan_was_made_for(ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    option = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    cluster = Cluster("c", 1, 2, Link(100.0, 5.0), Link(1.0, 20.0), 1, reduce_roots=(1,))
    plan = Plan("m", "c", (PlannedBucket(("w",), 5, 1, 0, "none", option),), {}, cluster)
    found = ranks.run(2, lambda _: plan_for(psgc.session.api.current_session(), Choice(plan=plan), "plan"))
    said = [
        record.getMessage()
        for record in caplog.records
        if "BYTEPS_REDUCE_ROOTS=1, which the workers of node 0 have not" in record.getMessage()
    ]
    assert found == [plan] * 2 and len(said) == 1


def test_a_second_optimizers_layout_is_not_written_and_that_is_said(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks.run(1, lambda rank: [train(rank), train(rank)], layout_out=str(tmp_path / "out"))
    assert len(load_plan(str(tmp_path / "out")).buckets) == 1
    assert "has the layout of optimizer0; that of optimizer1 is not written" in caplog.text


def test_a_tensor_that_no_rank_used_gets_zeros_if_its_bucket_travels_and_stays_as_it_was_if_not(ranks: Any, tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        model = build()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return [None if p.grad is None else p.grad.tolist() for p in model[1].parameters()]

    plan = planned((("1.bias", "0.weight", "0.bias"), 0), (("1.weight",), -1))
    assert ranks.run(2, work, plan=written(tmp_path / "p", plan)) == [[None, [0.0, 0.0]]] * 2


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            planned((("0.weight",), 0), (("0.bias", "1.weight"), 0)),
            "no bucket has tensor '1.bias' of this model; .*another model .two layers",
        ),
        (
            planned((tuple(MODEL), 0), (("head.weight",), 0), **{"head.weight": 5}),
            "it has a tensor 'head.weight', this model has none such",
        ),
        (planned((tuple(MODEL), 0), **{"1.bias": 3}), "the bucket of '0.weight' has 27 elements, in this model it has 26"),
        (planned((tuple(MODEL), 0), codec="onebitt"), r"buckets\[0\] \(of '0.weight'\): unknown codec 'onebitt'"),
    ],
)
def test_a_plan_for_another_model_is_refused(ranks: Any, tmp_path: Path, document: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ranks.run(1, train, plan=written(tmp_path / "p", document))


def test_a_bucket_of_two_parameter_groups_is_refused_only_where_residuals_follow_their_rates(ranks: Any, tmp_path: Path) -> None:
    def work(rank: int, follow: bool) -> list[float]:
        model = build()
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, (0.1, 0.2), strict=True)]
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(groups), model.named_parameters(), residuals_follow_lr=follow)
        model(torch.ones(1, 3)).sum().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        moved = zip(before, model.parameters(), strict=True)
        return [((was - now.detach()) / now.grad).mean().item() for was, now in moved if now.grad is not None]

    for rates in ranks.run(1, lambda rank: work(rank, False), plan=written(tmp_path / "p", WHOLE)):
        assert rates == pytest.approx([0.1, 0.1, 0.2, 0.2], rel=1e-3), "each group's own"
    with pytest.raises(UsageError, match=r"tensor '0.weight' is of parameter group 0, but shares a bucket of the plan with '1.bias' of 1"):
        ranks.run(1, lambda rank: work(rank, True), plan=written(tmp_path / "p", WHOLE))


def test_a_plan_whose_buckets_cannot_be_cut_ends_every_rank_with_the_same_line(ranks: Any, tmp_path: Path) -> None:
    document = planned((tuple(MODEL), 0))
    document["buckets"][0]["parts"] = 2
    with pytest.raises(PsgcError, match=r"tensor '0.weight': its bucket of 26 elements is cut into 2 parts; .* so plan at most 1"):
        ranks.run(2, train, plan=written(tmp_path / "p", document))
    said = {session.failed_with for session in ranks.sessions} - {None}
    assert len(said) == 1
    assert said.pop().startswith("tensor '0.weight': its bucket"), "no rank's own"


def test_ranks_with_different_plans_end_the_job_naming_the_bucket(ranks: Any, tmp_path: Path) -> None:
    other = planned((("1.bias", "0.weight"), 3), (("0.bias",), 9), (("1.weight",), 12))
    files = [written(tmp_path / "0", WHOLE), written(tmp_path / "1", other)]

    def work(rank: int) -> None:
        session = psgc.session.api.current_session()
        session.config = replace(session.config, plan=files[rank])
        train(rank)

    with pytest.raises(LayoutMismatch, match=r"priority of the plan's bucket 2 \(of '1.weight'\) on rank"):
        ranks.run(2, work)


def test_a_codec_named_by_the_script_and_a_plan_exclude_each_other(ranks: Any, tmp_path: Path) -> None:
    plan = written(tmp_path / "p", WHOLE)
    with pytest.raises(UsageError, match=r"compression is 'int8', but PSGC_PLAN=.* names each bucket's codec; leave one of the two out"):
        ranks.run(1, lambda rank: train(rank, compression="int8"), plan=plan)
    ranks.run(1, lambda rank: train(rank, compression="none"), plan=plan)


def test_parameters_added_after_the_first_step_are_refused_under_a_plan(ranks: Any, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model, head = build(), nn.Linear(2, 1)
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": head.parameters()})
        head(model(torch.ones(1, 3))).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"parameter 'param.1.0' was added after the first step, but the job runs a plan"):
        ranks.run(1, work, plan=written(tmp_path / "p", WHOLE))


def test_an_optimizer_with_codecs_of_its_own_refuses_a_plan(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="OneBitAdam sends momenta by a codec of its own"):
        ranks.run(1, lambda rank: psgc.OneBitAdam(build().parameters(), warmup_steps=1), plan=written(tmp_path / "p", WHOLE))


def test_coarse_codecs_of_a_plan_are_warned_of_under_adam(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int) -> None:
        model = build()
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()

    ranks.run(2, work, plan=written(tmp_path / "p", planned((tuple(MODEL), 0), codec="onebit/int8")))
    assert "codec onebit/int8 with Adam" in caplog.text


def test_a_layout_that_cannot_be_written_is_said(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"PSGC_LAYOUT_OUT=.*nowhere/out: No such file or directory"):
        ranks.run(1, train, layout_out=str(tmp_path / "nowhere" / "out"))
