"""The benchmark of planning at size, at small sizes; and the search at a large one, which has to come to a plan with a few times the effort of a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.methods.registry import METHODS
from psgc.plan.model.problem import Problem, codec_costs
from tests.benchmark_scripts import load

growth = load("planning_growth")


def test_the_bench_times_searches_and_the_command_and_draws_them(tmp_path: Path) -> None:
    points = growth.growth(["espresso-nvlink"], tensors=(3, 20), nodes=(2, 4))
    assert [(point.tensors, point.nodes) for point in points] == [(3, 2), (3, 4), (20, 2), (20, 4)]
    assert [point.command_s > 0 for point in points] == [False, False, False, True]
    assert [row[:2] for row in growth.rows(points)] == [["3", "2 x 8"], ["3", "4 x 8"], ["20", "2 x 8"], ["20", "4 x 8"]]
    growth.draw(points, tmp_path / "growth.svg")
    assert "espresso-nvlink, 4 x 8 GPUs" in (tmp_path / "growth.svg").read_text()


def test_ten_thousand_tensors_on_a_thousand_nodes_have_a_plan_that_is_shorter_than_without_compression() -> None:
    profile, cluster = growth.made_up(10_000), replace(load_cluster("espresso-nvlink"), nodes=1024)
    problem = Problem(profile, cluster, codec_costs(growth.CODEC, profile, cluster.gpus))
    found, uncompressed = METHODS["psgc"](problem), METHODS["fp32"](problem)
    assert sum(len(bucket.tensors) for bucket in found.buckets) == 10_000
    assert found.step_us < uncompressed.step_us
