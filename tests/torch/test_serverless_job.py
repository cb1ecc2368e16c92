"""Jobs without servers: a real scheduler and workers that aggregate among themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.layout.collective import ENCODED, SUM
from tests.conftest import ASKS_SCHEDULER

Make = Callable[..., Any]
DTYPES = "float32,float64,float16,bfloat16,int8,uint8,int64,bool"


def test_named_tensors_in_any_order_have_the_bits_that_servers_give(make_job: Make) -> None:
    """Each of three ranks submits in an order of its own; every element is held against the published tree."""
    texts = make_job(nodes=3, servers=0).said("--steps", "2", "--dtypes", DTYPES)
    assert all(re.search(r": none: 2 steps, 0 wrong", text) for text in texts), texts


def test_a_job_that_goes_on_does_so_bit_for_bit_though_each_place_that_encodes_has_a_residual(make_job: Make, tmp_path: Path) -> None:
    job = make_job(servers=0, env={"PSGC_FUSE_BYTES": "40000", "PSGC_MIN_COMPRESS_BYTES": "0"})
    said = "\n".join(job.said(str(tmp_path), "save,rollback", "topk", "scaled onebit", "OneBitAdam", job="resume.py"))
    found = set(re.findall(r"^weights (save|rollback) (\d) (\w{64})$", said, re.MULTILINE))
    assert {(number, digest) for how, number, digest in found if how == "save"} == {
        (number, digest) for how, number, digest in found if how == "rollback"
    }
    assert len(found) == 6, said


def test_every_function_works_in_orders_that_differ_and_ranks_end_with_the_same_weights(make_job: Make) -> None:
    """Two nodes, one of two workers, so that sums within nodes come first."""
    job = make_job(nodes=2, servers=0, env={"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_NODE_SIZES": "2,1"})
    job.scheduler()
    path = str(Path(__file__).parent / "job_serverless.py")
    workers = [
        job.worker(node, job=path, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(2 - node))
        for node, local in ((0, 0), (0, 1), (1, 0))
    ]  # fmt: skip
    assert set(job.end().values()) == {0}, job.text()
    found = [re.findall(r"^(?:none|int8|topk:k=0.05) \w{64}$", worker.text, re.MULTILINE) for worker in workers]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


REFUSED = str(Path(__file__).parent / "job_refused.py")


def test_a_rank_with_fewer_batches_ends_the_job_with_a_line_that_names_it(make_job: Make) -> None:
    """Which leaves while others are in a collective, and tells the scheduler so after that has broken."""
    job = make_job(servers=0)
    job.scheduler()
    first, _ = (job.worker(node, "fewer", job=REFUSED, **ASKS_SCHEDULER) for node in range(2))
    assert job.end()["worker 0"] == 1, job.text()
    assert "rank(s) 1 left the job, but others go on: every rank must run the same number of steps (rank 0: " in first.text


@pytest.mark.long
def test_codecs_and_plans_of_servers_end_every_rank_with_a_line(make_job: Make, tmp_path: Path) -> None:
    bucket = {"tensors": ["0.weight"], "numel": 19200, "parts": 1, "priority": 0, "codec": "none", "option": ["flat.push", "flat.pull"]}
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "model": "m", "cluster": "", "buckets": [bucket], "prediction": {}}))
    cases = {
        "codec shared needs servers, and this job has none; start one": ("shared", {}),
        "the bucket of '0.weight' goes over servers (flat.push flat.pull), but this job has none": (
            "none",
            {"PSGC_PLAN": str(tmp_path / "plan.json")},
        ),
    }
    for said, (case, env) in cases.items():
        job = make_job(servers=0)
        workers = job.whole(case, job=REFUSED, **env)
        job.end()
        assert [worker.popen.returncode for worker in workers] == [1, 1], job.text()
        assert all(said in worker.text for worker in workers), job.text()


@pytest.mark.long
def test_the_layout_of_such_a_job_is_a_plan_that_gives_the_same_weights_with_servers_or_without(make_job: Make, tmp_path: Path) -> None:
    """Small weights travel uncompressed, the others in int8: sums of both kinds are in the order of the ranks, wherever the plan runs."""
    job, env = str(Path(__file__).parent / "job_planned.py"), {"PSGC_CODEC": "int8"}
    used = tmp_path / "used.json"
    texts = make_job(servers=0).said(job=job, PSGC_LAYOUT_OUT=str(used), **env)
    plan = json.loads(used.read_text())
    assert {tuple(bucket["option"]) for bucket in plan["buckets"]} <= {SUM, ENCODED}
    for servers in (0, 1):
        again = make_job(servers=servers).said(job=job, PSGC_PLAN=str(used))
        assert [_weights(text) for text in again] == [_weights(text) for text in texts]


def _weights(text: str) -> list[str]:
    found = re.findall(r"^weights \w+$", text, re.MULTILINE)
    assert found, text
    return found
