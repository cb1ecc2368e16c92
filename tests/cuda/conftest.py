"""Where GPU kernels run in tests: on the GPU where there is one, else on CPU tensors under Triton's interpreter, as `make test-kernels` sets it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str:
    """Why kernels cannot run here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install -e '.[gpu-dev]'"
    return "" if INTERPRETED or torch.cuda.is_available() else "no CUDA device, and TRITON_INTERPRET is not 1: run `make test-kernels`"


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device that kernels run on."""
    if reason := missing():
        pytest.skip(reason)
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of overflow
        yield torch.device("cpu" if INTERPRETED else "cuda", None if INTERPRETED else 0)
