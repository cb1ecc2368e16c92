"""What OneBitAdam cannot be made with is refused, and named."""

from __future__ import annotations

from typing import Any

import pytest

import psgc.torch as psgc
from psgc.errors import CodecError, UsageError
from tests.torch.small_models import linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "OneBitAdam: lr is -1.0"),
        ({"betas": (0.9, 1.0)}, r"OneBitAdam: betas\[1\] is 1.0"),
        ({"warmup_steps": 0}, "OneBitAdam: warmup_steps is 0, expected a whole number of at least 1"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0"),
    ],
)
def test_options_out_of_range_are_refused(ranks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ranks.run(1, lambda _: psgc.OneBitAdam(linear().named_parameters(), **{"warmup_steps": 3, **options}))


def test_two_parameters_of_one_name_are_refused(ranks: Any) -> None:
    with pytest.raises(UsageError, match="two parameters are named 'weight'"):
        ranks.run(1, lambda _: psgc.OneBitAdam([*linear().named_parameters(), *linear().named_parameters()], warmup_steps=3))


def test_a_codec_that_cannot_carry_a_parameter_names_it(ranks: Any) -> None:
    with pytest.raises(CodecError, match="parameter 'weight': codec onebit carries"):
        ranks.run(1, lambda _: psgc.OneBitAdam(linear().double().named_parameters(), warmup_steps=3))
