"""Whole jobs over ps-lite: psgc's workers, servers and scheduler, and byteps 0.2.5.post15's, in any mix."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from psgc.pslite.byteps.registration import Registration
from tests.pslite.processes import PSGC_ROLE, STOCK_ROLE, run_job
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


def test_psgcs_workers_train_over_psgcs_own_ps_lite_server() -> None:
    outputs, statuses, errors = run_job(PSGC_ROLE, [[*WORKER, "20", "topk:k=0.1"]] * 2, servers=1)
    check(outputs, statuses, errors, "topk")
    assert errors.count("ps-lite has no authentication") == 4, "each role says so"


@pytest.mark.long
def test_six_hundred_steps_without_a_pause_have_no_wrong_sum_on_psgcs_server() -> None:
    """byteps's own server gives tens of wrong ones."""
    outputs, statuses, errors = run_job(PSGC_ROLE, [[*WORKER, "600", "none"]] * 2, servers=1)
    check(outputs, statuses, errors, "none")
    outputs, statuses, errors = run_job(PSGC_ROLE, [[*WORKER, "100", "onebit"]] * 3, servers=2)
    check(outputs, statuses, errors, "onebit")
