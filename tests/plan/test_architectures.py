"""The models by name have the sizes that are published for them."""

from __future__ import annotations

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.architectures import architecture, architecture_names


@pytest.mark.parametrize(
    ("name", "tensors", "numel", "gigaflops"),
    [
        ("vgg16", 32, 138_357_544, 30.9), ("resnet50", 161, 25_557_032, 8.2), ("resnet101", 314, 44_549_160, 15.6),
        ("ugatit", 148, 670_761_088, 243), ("bert-base", 199, 108_893_186, 0.170), ("gpt2", 148, 124_439_808, 0.247),
        ("lstm", 10, 85_974_278, 0.172), ("llama-1b", 146, 1_235_814_400, 2.47), ("llama-8b", 291, 8_030_261_248, 15.0),
    ],
)  # fmt: skip
def test_a_model_has_its_tensors_and_costs(name: str, tensors: int, numel: int, gigaflops: float) -> None:
    model = architecture(name)
    assert (len(model.weights), model.numel) == (tensors, numel)
    assert sum(weight.flops for weight in model.weights) / 1e9 == pytest.approx(gigaflops, rel=0.01)
    assert len({weight.name for weight in model.weights}) == tensors


def test_unknown_models_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'alexnet'; choose one of vgg16, .*llama-8b"):
        architecture("alexnet")
    assert "bert-base" in architecture_names()
    assert architecture("BERT_base").name == "bert-base"
