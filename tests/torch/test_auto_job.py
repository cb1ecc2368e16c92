"""``auto`` in real jobs: with the optimizer's wrapper and with DDP's hook, over servers and without them, on nodes of several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.planfile.reading import load_plan

JOB = str(Path(__file__).parent / "job_auto.py")
# By case, in order.
CHOICES = {
    "optimizer-slower": "none int4 int8 int4 none int4",
    "optimizer-quick": "none",
    "ddp-slower": "none int4 int8 int4 none int4",
    "ddp-quick": "none",
}


Found = list[tuple[str, str, str]]


def run(job: Any, sizes: tuple[int, ...], servers: int, *cases: str) -> tuple[Found, str]:
    """Of each case, its choices and the digest of the weights, the same on every rank; and what rank 0 said."""
    job.scheduler()
    for index in range(servers):
        job.server(index)
    workers = [
        job.worker(node, *cases, job=JOB, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(size))
        for node, size in enumerate(sizes)
        for local in range(size)
    ]
    assert set(job.end().values()) == {0}, job.text()
    found = [re.findall(r"^case (\S+): (.*); weights (\w+)$", worker.text, re.MULTILINE) for worker in workers]
    assert [case for case, _, _ in found[0]] == list(cases)
    assert all(of_rank == found[0] for of_rank in found), "every rank makes the same choices, and has the same weights"
    return found[0], workers[0].text


@pytest.mark.timeout(300)
def test_without_servers_the_quickest_choice_is_kept_under_ddp_too_or_none_where_nothing_pays(make_job: Callable[..., Any]) -> None:
    """Times are those of a table (auto_table.py): what is found does not depend on the machine."""
    env = {"PSGC_PLAN": "auto", "PSGC_NODE_SIZES": "2,1", "PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_LOG_LEVEL": "info"}
    found, said = run(make_job(nodes=2, servers=0, env=env), (2, 1), 0, *CHOICES)
    assert {case: choices for case, choices, _ in found} == CHOICES
    for name in ("optimizer0", "ddp0"):
        assert re.search(
            rf"{name}: auto, step 9: trying .*: a step takes 340\.0 ms by none, as over links of \S+ Gbit/s "
            r"\(within nodes \S+, by what copies and sums take here\); predicted, in ms",
            said,
        )
        assert re.search(rf"{name}: auto, step \d+: \S+ from now on; measured, in ms a step: none 340\.0, ", said)
        assert re.search(rf"{name}: auto, step \d+: a step takes \S+ ms instead of \S+: planning again", said)
    for name in ("optimizer1", "ddp1"):
        stays = re.findall(rf"{name}: auto, step \d+: (.*)", said)
        assert len(stays) == 1, stays
        assert re.match(
            r"none stays, since nothing else would save 5 %: a step takes 0\.0 ms by none, as over links of \S+ Gbit/s", stays[0]
        )


@pytest.mark.timeout(300)
def test_with_servers_nodes_of_several_ranks_may_sum_within_themselves_first(make_job: Callable[..., Any], tmp_path: Path) -> None:
    used = tmp_path / "used.json"
    env = {"PSGC_PLAN": "auto", "PSGC_NODE_SIZES": "2,2", "PSGC_LAYOUT_OUT": str(used), "PSGC_LOG_LEVEL": "info"}
    ((_, choices, _),), _ = run(make_job(nodes=2, servers=1, env=env), (2, 2), 1, "optimizer")
    assert choices == "none plan none plan"
    options = {bucket.option for bucket in load_plan(str(used)).buckets}
    assert any(action.startswith("intra.") for option in options for action in option), options


@pytest.mark.timeout(300)
def test_a_job_on_a_slow_link_compresses_and_does_without_when_the_link_has_become_fast(make_job: Callable[..., Any]) -> None:
    job = make_job(env={"PSGC_LOG_LEVEL": "info"})
    job.scheduler()
    job.server(0)
    workers = [job.worker(node, job=str(Path(__file__).parent / "job_auto_link.py")) for node in range(2)]
    assert set(job.end().values()) == {0}, job.text()
    said = [re.findall(r"^slow: (.*) after (\d+); fast: (.*); weights (\w+)$", worker.text, re.MULTILINE) for worker in workers]
    assert said[0] == said[1], "every rank makes the same choices, and has the same weights"
    ((slow, _, fast, _),) = said[0]
    assert (slow, fast) == ("none plan none plan", "plan none plan none"), workers[0].text
