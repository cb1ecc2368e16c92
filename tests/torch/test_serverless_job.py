"""Jobs without servers: a real scheduler and workers that aggregate among themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]
DTYPES = "float32,float64,float16,bfloat16,int8,uint8,int64,bool"


def test_named_tensors_in_any_order_have_the_bits_that_servers_give(make_job: Make) -> None:
    """Each of three ranks submits in an order of its own; every element is held against the published tree."""
    texts = make_job(nodes=3, servers=0).said("--steps", "2", "--dtypes", DTYPES)
    assert all(re.search(r": none: 2 steps, 0 wrong", text) for text in texts), texts
