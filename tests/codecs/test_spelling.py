"""Misspelt codecs, parameters and values: the error lists the valid ones and suggests the one that was probably meant."""

from __future__ import annotations

import pytest

from psgc.codecs.registry import parse_scheme, registered_aliases, registered_codecs, registered_schemes
from psgc.codecs.scheme import BucketContext
from psgc.errors import CodecError


def refused(text: str) -> str:
    with pytest.raises(CodecError) as caught:
        parse_scheme(text, BucketContext())
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("onebitt", "onebit"), ("one-bit", "onebit"), ("INT8", "int8"), ("sharred", "shared"), ("powersgdd:rank=4", "powersgd"),
        ("onebit/nit8", "int8"), ("onebit/rely", "relay"), ("topkk/relay", "topk"), ("topk:kk=1", "k"), ("topk:K=1", "k"),
        ("topk:momentm=dgc", "momentum"), ("powersgd:rnk=4", "rank"), ("topk:select=exakt", "exact"), ("topk:momentum=dcg", "dgc"),
        ("fp8:format=E5M2", "e5m2"), ("onebit:residul=int8", "residual"), ("graddrop:dorp=0.9", "drop"),
    ],
)  # fmt: skip
def test_what_is_misspelt_is_told_with_what_was_meant(text: str, meant: str) -> None:
    assert refused(text).endswith(f"; did you mean {meant}?")


def test_what_is_like_nothing_is_told_without_a_guess() -> None:
    assert "did you mean" not in refused("zzz")
    assert "did you mean" not in refused("topk:zzz=1")
    assert refused("powersgd:momentum=dgc").endswith("it takes rank, ef"), "what it does not take is not offered"


def test_every_codec_is_in_the_list() -> None:
    listed = refused("zzz").partition("choose one of ")[2].partition(";")[0].split(", ")
    assert {*registered_codecs(), *registered_aliases(), *registered_schemes()} <= set(listed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8/shared", "codec shared takes several rounds: write 'shared' by itself, not as one of a pair"),
        ("relay", "codec relay is an answer alone: write it behind the codec whose payloads are forwarded, as in 'onebit/relay'"),
    ],
)
def test_a_name_in_the_wrong_place_is_told_as_that(text: str, message: str) -> None:
    assert refused(text) == message
