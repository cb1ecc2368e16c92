"""Models under DistributedDataParallel and psgc's hook, over a real scheduler, servers and workers, beside stock DDP over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import for_each

pytestmark = pytest.mark.timeout(300)  # the job is the first test's set-up
EXACT = (
    "plain",
    "views",
    "static",
    "accumulating",
    "accumulating_views",
    "accumulating_aloud",
    "unused",
    "channels_last",
    "bf16",
    "unused_views",
    "checkpointed",
    "reentrant",
)
CODED = ("int8", "powersgd", "unused_onebit")
UNUSED_MAP_BYTES = 1000  # DDP tells the ranks which parameters were used, one number each
Case = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cases(make_shared_job: Callable[..., Any]) -> dict[str, Case]:
    """What both ranks said of each case."""
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000"}
    texts = make_shared_job(servers=2, env=env).said(job=str(Path(__file__).parent / "job_ddp.py"))
    said = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return {case["case"]: [of_rank for of_rank in said if of_rank["case"] == case["case"]] for case in said}


@for_each(name=EXACT)
def test_uncompressed_training_is_stock_ddps_bit_by_bit(cases: dict[str, Case], name: str) -> None:
    for of_rank in cases[name]:
        stock, mine = of_rank["losses"]
        assert mine == stock
        assert of_rank["digests"] == [cases[name][0]["digests"][0]] * 2


@for_each(name=[*EXACT, *CODED])
def test_psgc_carries_every_gradient_and_gloo_none(cases: dict[str, Case], name: str) -> None:
    for of_rank in cases[name]:
        steps = of_rank["steps"]
        stock, mine = of_rank["reduced"]
        assert stock >= of_rank["gradient_bytes"] == steps * of_rank["parameter_bytes"] > 0, "the count can see gradients"
        assert mine <= UNUSED_MAP_BYTES
        if name in EXACT and "unused" not in name:  # there, what nobody has does not travel
            assert 2 * of_rank["gradient_bytes"] < of_rank["wire_bytes"] < 2.02 * of_rank["gradient_bytes"]


@for_each(name=CODED)
def test_ranks_end_with_the_same_weights(cases: dict[str, Case], name: str) -> None:
    first, second = cases[name]
    assert first["digests"][1] == second["digests"][1]
    assert first["digests"][1] != first["digests"][0], "the codec has an effect"


def test_codecs_compress_what_ddp_hands_over(cases: dict[str, Case]) -> None:
    for name, less in {"int8": 3.5, "powersgd": 10, "unused_onebit": 15}.items():
        for of_rank in cases[name]:
            assert of_rank["wire_bytes"] * less < 2 * of_rank["gradient_bytes"], name


def test_what_onebit_does_not_send_stays_with_its_tensor_when_ddp_makes_new_buckets(cases: dict[str, Case]) -> None:
    for of_rank in cases["conserved"]:
        assert of_rank["worst"] < 1e-6
        assert of_rank["largest"] > 1e-4, "something is kept"


@for_each(name=["scaled", "joined", "resumed"])
def test_a_scaler_that_skips_a_rank_with_less_data_and_a_resumed_job_change_nothing(cases: dict[str, Case], name: str) -> None:
    for of_rank in cases[name]:
        assert of_rank["digests"][0] == of_rank["digests"][1]
