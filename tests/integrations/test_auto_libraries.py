"""``auto`` with libraries that wrap models in DistributedDataParallel: it measures and switches from one optimizer's step to the next, whoever calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integrations.test_libraries import needs, run
from tests.torch.auto_table import TIMES

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
# All accumulate: an optimizer's step is two backwards, of which DDP hands over one. With momentum, SGD takes a while to make up for what a
# top-k of 1 % delays.
CASES = {"ddp_trainer": {"accumulate": 2}, "ddp_lightning": {"accumulate": 2}, "ddp_accelerate": {"steps": 300}, "ddp_plain": {}}


@pytest.mark.parametrize("example", CASES)
def test_it_chooses_and_trains_as_stock_ddp_does(example: str) -> None:
    needs(example)
    options = json.dumps({"steps": 45, **CASES[example]})
    done = run("--no-prefix", "--", sys.executable, str(Path(__file__).parent / "job_auto.py"), example, options)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    assert (first["choices"], first["digest"]) == (second["choices"], second["digest"])
    assert len(set(first["choices"])) > 1
    assert first["choices"][-1] == min(first["choices"], key=lambda name: TIMES[name])
    for said in (first, second):
        (first_loss, stock), (_, mine) = said["losses"]
        assert first_loss - mine > 0.9 * (first_loss - stock)
    assert "from now on; measured, in ms a step: none 340.0" in done.stderr
