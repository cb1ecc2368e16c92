"""Whole jobs over ps-lite: psgc's workers, servers and scheduler, and byteps 0.2.5.post15's, in any mix."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from psgc.pslite.byteps.registration import Registration
from tests.pslite.processes import PSGC_SCHEDULER, PSGC_SERVER, STOCK_SCHEDULER, STOCK_SERVER, run_job
from tests.pslite.stock import Unavailable, library

WORKER = [sys.executable, "tests/jobs/pslite.py"]


def needs_stock() -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"byteps 0.2.5.post15 cannot be built here: {error}")


def check(outputs: list[str], statuses: list[int], errors: str, codec: str) -> None:
    assert statuses == [0] * len(statuses), errors
    told = [json.loads(out.splitlines()[-1]) for out in outputs]
    assert sorted(one["rank"] for one in told) == list(range(len(outputs)))
    for one in told:
        assert one["wrong"] == 0 and one["large"] and all(one["dtypes"].values()), one
        assert one["checksum"] == told[0]["checksum"], "all ranks have the same model"
    assert np.mean([one["losses"][-1] for one in told]) < np.mean([one["losses"][0] for one in told]), codec


@pytest.mark.long
@pytest.mark.timeout(560)
def test_psgcs_workers_train_over_psgcs_own_ps_lite_server() -> None:
    outputs, statuses, errors = run_job(PSGC_SCHEDULER, [PSGC_SERVER], [[*WORKER, "20", "topk:k=0.1"]] * 2)
    check(outputs, statuses, errors, "topk")
    assert errors.count("ps-lite has no authentication") == 4, "each role says so"


@pytest.mark.long
@pytest.mark.timeout(560)
def test_six_hundred_steps_without_a_pause_have_no_wrong_sum_on_psgcs_server() -> None:
    outputs, statuses, errors = run_job(PSGC_SCHEDULER, [PSGC_SERVER], [[*WORKER, "600", "none"]] * 2)
    check(outputs, statuses, errors, "none")
    outputs, statuses, errors = run_job(PSGC_SCHEDULER, [PSGC_SERVER] * 2, [[*WORKER, "100", "onebit"]] * 3)
    check(outputs, statuses, errors, "onebit")


REGISTRATIONS = [
    Registration.of(dict(pair.split("=") for pair in text.split())).text().decode()
    for text in (
        "compressor_type=onebit compressor_onebit_scaling=true", "compressor_type=topk compressor_k=0.01", "compressor_type=randomk compressor_k=0.02 seed=7",
        "compressor_type=dithering compressor_k=4 seed=3", "compressor_type=dithering compressor_k=3 seed=3 dithering_partition=1 dithering_normalize=1",
    )
]  # fmt: skip
STOCK_WORKER = [sys.executable, "-c", "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('tests/jobs/pslite_stock.py')"]


def check_sums(outputs: list[str], statuses: list[int], errors: str) -> None:
    assert statuses == [0] * len(statuses), errors
    for out in outputs:
        told = json.loads(out.splitlines()[-1])
        assert told["wrong"] == 0 and not told.get("different"), told


@pytest.mark.long
@pytest.mark.timeout(560)
def test_psgcs_workers_train_over_bytepss_own_server_and_scheduler() -> None:
    needs_stock()
    for servers, codec in ((1, "onebit"), (2, "topk:k=0.1"), (1, "randomk:k=0.1"), (2, "dithering:k=4")):
        outputs, statuses, errors = run_job(STOCK_SCHEDULER, [STOCK_SERVER] * servers, [[*WORKER, "20", codec]] * 2)
        check(outputs, statuses, errors, codec)


@pytest.mark.long
@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("scheduler", "servers"),
    [
        pytest.param(STOCK_SCHEDULER, [STOCK_SERVER], id="BytePS's"),
        pytest.param(STOCK_SCHEDULER, [PSGC_SERVER], id="psgc's"),
        pytest.param(STOCK_SCHEDULER, [STOCK_SERVER, PSGC_SERVER], id="one of each"),
        pytest.param(PSGC_SCHEDULER, [STOCK_SERVER, PSGC_SERVER], id="one of each, and psgc's scheduler"),
    ],
)
def test_three_hundred_steps_of_three_workers_without_a_pause_are_right_in_every_element(
    scheduler: list[str], servers: list[list[str]]
) -> None:
    needs_stock()
    outputs, statuses, errors = run_job(scheduler, servers, [[*WORKER, "300", "none"]] * 3)
    check(outputs, statuses, errors, "none")


@pytest.mark.long
@pytest.mark.timeout(560)
def test_bytepss_workers_get_their_own_bytes_and_exact_sums_of_psgcs_server() -> None:
    """Without a pause between steps, on one server and on two."""
    needs_stock()
    for servers in (1, 2):
        workers = [[*STOCK_WORKER, "600", ",".join(REGISTRATIONS)]] * 2
        check_sums(*run_job(PSGC_SCHEDULER, [PSGC_SERVER] * servers, workers))


@pytest.mark.long
@pytest.mark.timeout(560)
def test_workers_of_both_kinds_share_a_job_on_servers_of_either() -> None:
    needs_stock()
    for server, steps, pause in ((PSGC_SERVER, "300", []), (STOCK_SERVER, "20", ["barrier"])):
        for scheduler in (PSGC_SCHEDULER, STOCK_SCHEDULER):
            workers = [[*WORKER, steps, "sums", *pause], [*STOCK_WORKER, steps, "", *pause]]
            check_sums(*run_job(scheduler, [server] * 2, workers, {"PSGC_PSLITE_RACY": "1"} if pause else {}))
