"""Jobs without servers: a real scheduler and workers that aggregate among themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[..., Any]
DTYPES = "float32,float64,float16,bfloat16,int8,uint8,int64,bool"


def test_named_tensors_in_any_order_have_the_bits_that_servers_give(make_job: Make) -> None:
    """Each of three ranks submits in an order of its own; every element is held against the published tree."""
    texts = make_job(nodes=3, servers=0).said("--steps", "2", "--dtypes", DTYPES)
    assert all(re.search(r": none: 2 steps, 0 wrong", text) for text in texts), texts


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
