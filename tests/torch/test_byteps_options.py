"""What ``compression=`` takes: text, objects, BytePS's options in all their spellings, and rules for each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.codecs import BucketContext, parse_codec, parse_scheme
from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.byteps_options import options_text
from tests.torch.small_models import batch, seeded

BYTEPS = [
    ({"byteps_compressor_type": "onebit", "byteps_compressor_onebit_scaling": True, "byteps_ef_type": "vanilla"}, "onebit:ef=1,scale=block"),
    ({"byteps_compressor_type": "onebit", "byteps_compressor_onebit_scaling": "true"}, "onebit:ef=0,scale=block"),
    ({"byteps_compressor_type": "onebit"}, "onebit:ef=0,scale=unit"),
    ({"byteps_compressor_type": "topk", "byteps_compressor_k": 0.01, "byteps_error_feedback_type": "vanilla"}, "topk:ef=1,k=0.01"),
    ({"byteps_compressor_type": "topk", "byteps_compressor_k": "3.0"}, "topk:ef=0,k=3"),
    ({"compressor": "randomk", "k": 8, "ef": "vanilla", "seed": 13}, "randomk:ef=1,k=8"),
    (
        {"compressor": "topk", "k": 0.1, "ef": "vanilla", "momentum": "nesterov", "mu": 0.8, "fp16": True},
        "topk:ef=1,k=0.1,momentum=nesterov,mu=0.8",
    ),
    (
        {"byteps_compressor_type": "dithering", "byteps_compressor_k": 4, "byteps_dithering_partition": 1, "byteps_dithering_normalize": "l2"},
        "dithering:ef=0,k=4,normalize=l2,partition=natural",
    ),
    ({"fp16": True}, "fp16"),
    ({"fp16": False, "byteps_compressor_type": None}, "none"),
    ({}, "none"),
]  # fmt: skip
WRONG = [
    ({"byteps_compresor_type": "topk"}, "did you mean byteps_compressor_type"),
    ({"compressor": "topkk", "k": 1}, "one of onebit, topk, randomk, dithering, not 'topkk'; did you mean topk"),
    ({"compressor": "topk"}, "byteps_compressor_k is missing, which topk needs"),
    ({"compressor": "topk", "k": "many"}, "k is a number above 0, not 'many'"),
    ({"byteps_compressor_k": 1}, "byteps_compressor_type is not; set it"),
    ({"compressor": "topk", "k": 1, "byteps_compressor_k": 2}, "the same option, with different values"),
    ({"compressor": "onebit", "ef": "vanilla"}, "set byteps_compressor_onebit_scaling to True"),
    ({"compressor": "topk", "k": 1, "momentum": "nesterov"}, "set byteps_ef_type to vanilla"),
    ({"compressor": "topk", "k": 1, "ef": "fancy"}, "ef is one of vanilla, not 'fancy'"),
    ({"fp16": "maybe"}, "fp16 is True or False"),
]  # fmt: skip


def test_byteps_options_in_every_spelling_are_codec_text_that_exists() -> None:
    for options, text in BYTEPS:
        assert options_text(options) == text
        parse_scheme(text, BucketContext("float32"))


def test_wrong_options_are_named_as_they_were_spelt() -> None:
    for options, message in WRONG:
        with pytest.raises(CodecError, match=message):
            options_text(options)


def test_a_push_pull_takes_text_objects_and_options_and_names_declared_before_keep_theirs(ranks: Any) -> None:
    given = [None, "fp16", psgc.Compression.fp16, parse_codec("fp16"), {"fp16": True}]

    def work(rank: int) -> list[float]:
        psgc.declare("declared", byteps_compressor_type="topk", byteps_compressor_k=1)
        psgc.declare("undeclared")
        x = torch.tensor([1.0, 3.0])
        results = [psgc.push_pull(x * (rank + 1), name=str(i), compression=c) for i, c in enumerate(given)]
        psgc.push_pull(x, name="declared")
        return [result[1].item() for result in results]

    assert ranks.run(2, work) == [[4.5] * len(given)] * 2
    codecs = {name.removeprefix("push_pull."): layout.buckets[0].codec for name, layout in ranks.sessions[0].job.layouts.items()}
    assert codecs == {"0": "none", "1": "fp16", "2": "fp16", "3": "fp16", "4": "fp16", "declared": "topk:k=1,ef=0"} or codecs[
        "declared"
    ].startswith("topk:")


def test_what_is_no_codec_is_refused_with_the_remedy() -> None:
    from psgc.torch.tensors.codec_text import codec_text

    with pytest.raises(
        UsageError, match="expected codec text such as 'int8', BytePS's options, a codec, a class with compress and decompress"
    ):
        codec_text(3, "float32")


def test_compressors_compress_by_hand_as_bytepss_do() -> None:
    x, integers = torch.tensor([1.0, 2.5]), torch.tensor([1, 2])
    for compressor, dtype in (
        (psgc.Compression.none, torch.float32),
        (psgc.Compression.fp16, torch.float16),
        (psgc.Compression.bf16, torch.bfloat16),
    ):
        small, ctx = compressor.compress(x)
        assert small.dtype == dtype and torch.equal(compressor.decompress(small, ctx), x)
        assert compressor.decompress(*compressor.compress(integers)) is integers


RULES: list[Any] = [
    lambda name, parameter: None if parameter.dim() == 1 else {"compressor": "topk", "k": 0.5},
    {"*.bias": "none", "0.*": "topk:k=0.5,ef=0", "*": "topk:ef=0,k=0.5"},
]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_each_parameter_its_codec_and_fuses_those_of_one(ranks: Any, rule: Any) -> None:
    def work(rank: int) -> list[float]:
        model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=rule)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return [p.sum().item() for p in model.parameters()]

    first, second = ranks.run(2, work)
    assert first == second
    layout = ranks.sessions[0].job.layouts["optimizer0"]
    names = [[layout.tensors[i].name for i in bucket.tensors] for bucket in layout.buckets]
    assert names == [["1.bias", "0.bias"], ["1.weight", "0.weight"]]
    assert [bucket.codec.partition(":")[0] for bucket in layout.buckets] == ["none", "topk"]


def test_rules_that_name_no_codec_are_refused_by_the_parameters_name(ranks: Any) -> None:
    def wrap(rule: Any) -> None:
        model = torch.nn.Linear(3, 2)
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=rule)

    def work(_: int) -> None:
        with pytest.raises(UsageError, match=r"'bias': none of the patterns '\*\.weight', 'we\*' fits; add '\*': 'none'"):
            wrap({"*.weight": "int8", "we*": "none"})
        with pytest.raises(UsageError, match="parameter 'weight': the rule's compression is 3"):
            wrap(lambda name, parameter: 3)
        with pytest.raises(CodecError, match=r"parameter 'weight': the rule's unknown codec 'intt8'"):
            wrap(lambda name, parameter: "intt8")

    ranks.run(1, work)
