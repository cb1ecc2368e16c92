"""Options over groups of ranks in real jobs: exact sums without loss, and a plan's training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.planfile.reading import load_plan
from tests.torch.test_planned_job import JOB as TRAINING
from tests.torch.test_planned_job import SIZES, digests

JOB = str(Path(__file__).parent / "job_options.py")
REDUCED = ["flat.reduce_scatter", "flat.all_gather"]
TWICE = ["comp@cpu", "flat.all_to_all.c", "decomp@cpu", "comp@cpu", "flat.all_gather.c", "decomp@cpu"]


BEHIND_NODES = ["intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather"]


def run_on(job: Any, node_sizes: tuple[int, ...], **env: str) -> str:
    """What the workers say, the whole job having ended well. node_sizes: ranks of each node."""
    job.scheduler()
    for index in range(job.servers):
        job.server(index)
    workers = [
        job.worker(node, job=JOB, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(size), **env)
        for node, size in enumerate(node_sizes)
        for local in range(size)
    ]
    assert set(job.end().values()) == {0}, job.text()
    return "\n".join(worker.text for worker in workers)


@pytest.mark.timeout(300)
def test_a_sample_of_the_options_gives_every_rank_the_exact_mean_and_a_late_rank_is_named(
    make_job: Callable[..., Any], tmp_path: Path
) -> None:
    """Options over servers, too: of two, each of which has room for one key at a time."""
    job = make_job(nodes=2, servers=2, hang_s=250, env={"PSGC_WINDOW_BYTES": "1"})
    said = run_on(job, (1, 2), OPTIONS_EVERY="73", OPTIONS_LATE="2", OPTIONS_AWAITED=str(tmp_path / "awaited"))
    assert re.search(r"rank [01] waits in \S+ of 't\d+' in its step 1 for .*2; does each of them call backward\(\) and step\(\)\?", said), (
        said
    )
    assert len(re.findall(r"checked 60 options, nodes of \(1, 2\)", said)) == 3
    digest_over_servers(said, ranks=3)


def digest_over_servers(said: str, ranks: int) -> str:
    """Of all results over servers, which are the same on all ranks."""
    found = re.findall(r"checked 8 buckets over servers, digest (\w+)", said)
    assert len(found) == ranks, said
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_results_over_servers_are_the_same_bits_in_every_run_over_any_transport(make_job: Callable[..., Any]) -> None:
    jobs = [make_job(nodes=2, servers=2, hang_s=250, env={"PSGC_TRANSPORT": transport}) for transport in ("tcp", "tcp", "auto")]
    assert len({digest_over_servers(run_on(job, (2, 2), OPTIONS_EVERY="2000"), ranks=4) for job in jobs}) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_of_the_options_do(make_job: Callable[..., Any]) -> None:
    said = run_on(make_job(nodes=2, hang_s=850), (2, 2))
    digest_over_servers(said, ranks=4)
    assert len(re.findall(r"checked 4341 options, nodes of \(2, 2\)", said)) == 4
    said = run_on(make_job(nodes=3, hang_s=850), (1, 2, 3), OPTIONS_EVERY="21")
    digest_over_servers(said, ranks=6)
    assert len(re.findall(r"checked 207 options, nodes of \(1, 2, 3\)", said)) == 6


# Codecs of one round, but for tbq, which keeps up only with gradients below its threshold.
LOSSY = "int8 int4 fp8 onebit topk:k=0.25 blocktopk:k=0.25 randomk:k=0.25 dithering:ef=1"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_sample_of_the_options_keeps_what_each_codec_loses(make_job: Callable[..., Any]) -> None:
    for sizes, every in (((2, 2), "127"), ((1, 2), "211")):
        said = run_on(make_job(nodes=2, hang_s=850), sizes, OPTIONS_EVERY=every, OPTIONS_LOSSY=LOSSY)
        same_on_all_ranks(said, sum(sizes))


def same_on_all_ranks(said: str, ranks: int) -> None:
    """The results of all options, where each rank has checked what is missing of them."""
    found = re.findall(r"checked \d+ lossy buckets, digest (\w+), of \d+ codecs", said)
    assert len(found) == ranks, said
    assert len(set(found)) == 1, found


@pytest.mark.timeout(300)
def test_nodes_of_other_sizes_end_with_the_same_results_where_options_lose_something(make_job: Callable[..., Any]) -> None:
    same_on_all_ranks(run_on(make_job(nodes=2, servers=0, hang_s=250), (1, 2), OPTIONS_EVERY="397", OPTIONS_LOSSY="int8 topk:k=0.25"), 3)


@pytest.mark.timeout(500)
def test_a_plan_of_collectives_trains_with_the_sums_of_servers_where_nothing_is_lost(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """Beside a bucket over servers, and one that is encoded; two ranks' sums are the same in any order."""
    chosen = [
        (("0.bias", "4.weight"), "none", ["flat.push", "flat.pull"]), (("2.weight",), "int8", TWICE),
        (("4.bias", "0.weight"), "none", REDUCED), (("2.bias",), "none", BEHIND_NODES),
    ]  # fmt: skip
    buckets = [
        {"tensors": list(names), "numel": sum(SIZES[name] for name in names), "parts": 1, "priority": -n, "codec": codec, "option": option}
        for n, (names, codec, option) in enumerate(chosen)
    ]
    path, used = tmp_path / "plan.json", tmp_path / "used.json"
    path.write_text(json.dumps({"version": 1, "model": "m", "cluster": "", "buckets": buckets, "prediction": {}}))
    default = digests(make_job().said(job=TRAINING))
    planned = digests(make_job(env={"PSGC_PLAN": str(path), "PSGC_LAYOUT_OUT": str(used)}).said(job=TRAINING))
    assert all(first == second for first, second in planned.values()), "ranks agree"
    same = {what.removeprefix("gradient ") for what in planned if planned[what] == default[what]}
    assert same == set(SIZES) - {"2.weight"}
    assert [bucket.option for bucket in load_plan(str(used)).buckets] == [tuple(option) for _, _, option in chosen]
