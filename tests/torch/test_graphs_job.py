"""Real jobs whose models are compiled, or run in CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CODECS = ("none", "onebit")


@pytest.mark.timeout(300)
def test_replayed_graphed_and_compiled_models_end_with_the_weights_of_others(make_shared_job: Callable[..., Any]) -> None:
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # a bucket for each tensor: the order in which gradients become ready, which differs, would else be part of the codec's blocks
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "16384", "PSGC_FUSE_BYTES": "1", "PYTHONPATH": path}
    for said in make_shared_job(servers=1, env=env).said(*CODECS, job=str(Path(__file__).parent / "job_graphs.py")):
        for codec in CODECS:
            for how in ("replayed", "graphed", "compiled"):
                assert f"{codec} {how} same races []" in said, said
