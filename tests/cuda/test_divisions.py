"""Division in torch for GPU sides: on a GPU, torch multiplies by a number's reciprocal, which gives another float than the quotient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from psgc.codecs.backends import cuda_side
from psgc.codecs.registry import parse_codec
from tests.cuda.against_cpu import STREAM, status


class Quotients(TorchDispatchMode):
    """What floats are divided by: tensors with a dimension, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.by_tensors, self.by_numbers = 0, 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operator.overloadpacket.__name__ in ("div", "div_", "true_divide") and arguments[0].is_floating_point():
            tensor = isinstance(arguments[1], torch.Tensor) and arguments[1].dim() > 0
            self.by_tensors, self.by_numbers = self.by_tensors + tensor, self.by_numbers + (not tensor)
        return operator(*arguments, **(named or {}))


def test_a_number_that_is_divided_by_is_seen() -> None:
    with Quotients() as found:
        torch.ones(2) / 3
        torch.ones(2).div_(3)
        torch.ones(2) / torch.full((1,), 3.0)
    assert (found.by_numbers, found.by_tensors) == (2, 1)


def test_no_gpu_side_divides_floats_by_a_number(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not run: what is left are torch's operators."""
    from tests.cuda import tour
    from tests.cuda.ahead import modules

    monkeypatch.setattr(tour, "TEXTS", (*tour.TEXTS[:2], "randomk"))
    monkeypatch.setattr(tour, "SCHEMES", ("int8:momentum=nesterov,clip=1", "int8/relay", "shared"))
    for module in modules("psgc.cuda"):
        if "launch" in vars(module):
            monkeypatch.setattr(module, "launch", lambda *arguments, **constants: None)
    with Quotients() as found:
        tour.tour()
        for dtype in ("float64", "int32"):
            codec = parse_codec("none", dtype)
            sums = torch.ones(33, dtype=torch.float64 if dtype == "float64" else torch.int64, device=device)
            out = torch.zeros(codec.payload_bound(33) + 16, dtype=torch.uint8, device=device)
            cuda_side(codec).finish(sums, 33, 7, None, None, 1.0, STREAM, out, status(device))
    assert found.by_numbers == 0 < found.by_tensors
