"""The text form of codecs: what is printed is read back, and what is wrong names codec and parameter."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from psgc.codecs.codec import DTYPES, FLOATS
from psgc.codecs.common.texts import split_texts
from psgc.codecs.registry import parse_codec, parse_pair, parse_scheme, registered_aliases, registered_codecs
from psgc.codecs.scheme import BucketContext
from psgc.codecs.table import ROWS
from psgc.codecs.topk import TopKCodec
from psgc.errors import CodecError
from psgc.launch.pages.codecs import render_ids, section

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"

CANONICAL = {
    "none": "none",
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "int8:ef=1": "int8",
    "int8:ef=0": "int8:ef=0",
    "onebit:ef=0": "onebit:ef=0",
    "topk": "topk",
    "topk:k=0.010": "topk",
    "topk:k=1e-2,ef=1": "topk",
    "topk:k=.25": "topk:k=0.25",
    "topk:k=0.001,ef=0": "topk:ef=0,k=0.001",
    "topk:k=1": "topk:k=1",
    "topk:k=007": "topk:k=7",
    "topk:k=1e-7": "topk:k=0.0000001",
    "topk:select=exact": "topk",
    "topk:select=sampled,k=0.1": "topk:k=0.1,select=sampled",
    "graddrop:drop=.990": "topk:select=sampled",
    "graddrop:drop=0.999,ef=0": "topk:ef=0,k=0.001,select=sampled",
    "ternary:ef=0": "dithering:k=1",
    "majority": "onebit:ef=0,scale=unit",
    "randomk:k=0.01,ef=0": "randomk:ef=0",
    "randomk:k=100": "randomk:k=100",
    "onebit:scale=block": "onebit",
    "onebit:scale=unit,ef=0": "onebit:ef=0,scale=unit",
    "dithering:k=007,partition=linear,normalize=max": "dithering",
    "dithering:partition=natural,k=4,ef=1": "dithering:ef=1,k=4,partition=natural",
    "tbq:tau=1.0": "tbq",
    "tbq:tau=1E-3": "tbq:tau=0.001",
    "tbq:tau=0.1": "tbq:tau=0.1",
    "tbq:tau=20": "tbq:tau=20",
    "tbq:tau=1e9": "tbq:tau=1e+09",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_canonical_text_reads_back_as_itself(text: str, canonical: str) -> None:
    assert parse_codec(text).canonical == canonical
    assert parse_codec(canonical).canonical == canonical


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("topk:k=0", ["topk", "k", "'0'"]),
        ("topk:k=0.0", ["topk", "k"]),
        ("topk:k=-3", ["topk", "k", "'-3'"]),
        ("topk:k=1.5", ["topk", "k", "'1.5'"]),
        ("topk:k=1.0", ["topk", "k"]),
        ("topk:k=nan", ["topk", "k"]),
        ("topk:k=inf", ["topk", "k"]),
        ("topk:k=many", ["topk", "k", "'many'"]),
        ("topk:k=1e-10", ["topk", "k"]),
        ("topk:k=1e-999999999", ["topk", "k"]),
        ("topk:select=best", ["topk", "select", "exact or sampled or mstopk", "'best'"]),
        ("topk:k=123456789012345678901", ["topk", "k"]),
        ("graddrop:drop=0", ["graddrop", "drop", "'0'"]),
        ("graddrop:drop=1", ["graddrop", "drop", "'1'"]),
        ("randomk:k=0", ["randomk", "k", "'0'"]),
        ("int8:ef=2", ["int8", "ef", "'2'"]),
        ("onebit:ef=yes", ["onebit", "ef", "'yes'"]),
        ("onebit:k=0.1", ["onebit", "k", "ef"]),
        ("none:ef=1", ["none", "ef", "no parameters"]),
        ("bf16:ef=0", ["bf16", "ef"]),
        ("int8:ef", ["int8", "ef"]),
        ("int8:ef=1,ef=0", ["int8", "ef", "twice"]),
        ("onebits", ["onebits", "onebit", "topk"]),
    ],
)
def test_a_wrong_parameter_is_a_codec_error_that_names_it(text: str, names: list[str]) -> None:
    with pytest.raises(CodecError) as caught:
        parse_codec(text)
    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", registered_codecs())
@pytest.mark.parametrize("dtype", DTYPES)
def test_none_carries_every_dtype_and_the_others_floats(name: str, dtype: str) -> None:
    if name == "none" or dtype in FLOATS:
        assert parse_codec(name, dtype).dtype == dtype
    else:
        with pytest.raises(CodecError, match=rf"{name}.*not {dtype}.*none"):
            parse_codec(name, dtype)


@pytest.mark.parametrize(
    ("k", "numel", "count"),
    [("0.01", 1, 1), ("0.01", 100, 1), ("0.01", 101, 2), ("0.07", 100, 7), ("0.1", 4096, 410), ("5", 3, 3), ("5", 900, 5)],
)
def test_a_fraction_is_rounded_up_exactly_and_a_count_is_at_most_the_part(k: str, numel: int, count: int) -> None:
    codec = parse_codec(f"topk:k={k}")
    assert isinstance(codec, TopKCodec)
    assert codec.count(numel) == count


def test_codecs_are_unbiased_only_where_their_parameters_make_them_so() -> None:
    unbiased = {
        text: parse_codec(text).unbiased for text in ("none", "bf16", "int8", "int8:ef=0", "onebit:ef=0", "topk:ef=0", "randomk:ef=0")
    }
    assert [text for text, is_so in unbiased.items() if is_so] == ["none", "int8:ef=0", "randomk:ef=0"]


def test_feedback_is_what_ef_says() -> None:
    assert [parse_codec(text).feedback for text in ("none", "bf16", "int8", "int8:ef=0", "topk")] == [False, False, True, False, True]


def test_a_pair_is_written_once_where_both_ways_are_alike() -> None:
    assert parse_pair("onebit/int8:ef=1").canonical == "onebit/int8"
    assert parse_pair("topk:k=0.01/topk").canonical == "topk"


IDS = {
    "none": 0, "bf16": 1, "fp16": 2, "int8": 3, "onebit": 4, "topk": 5, "fp8": 6, "int4": 7, "int8:rotate=1": 8, "int4:rotate=1": 9,
    "fp8:format=e5m2": 10, "ternary": 11, "tbq": 12, "dithering": 13, "dithering:partition=natural": 14, "majority": 15, "onebit:ef=0,scale=unit": 16,
    "graddrop": 18, "topk:select=sampled": 20, "blocktopk": 21, "randomk": 22, "topk:select=mstopk": 31, "blocktopk:block=4097": 32,
}  # fmt: skip


def test_codec_ids_are_fixed_and_the_table_has_each_once() -> None:
    assert {row.text: row.codec_id for row in ROWS if not row.inner} == IDS
    assert len({row.codec_id for row in ROWS}) == len(ROWS)


def test_a_codec_has_the_id_of_its_row_and_a_retired_one_that_of_the_codec_that_took_its_place() -> None:
    for row in ROWS:
        if not row.inner:
            assert parse_codec(row.text).canonical == (row.retired or row.text)
            assert parse_codec(row.text).codec_id == IDS[row.retired.replace("dithering:k=1", "dithering") or row.text], row
    assert {row.text for row in ROWS if row.retired} == set(registered_aliases())


def test_the_page_has_the_table_of_ids() -> None:
    assert section(PAGE.read_text(), "ids") == render_ids(), "run: python -m psgc.launch.pages.codecs docs/codecs.md"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp8:format=e3m4", "format is e4m3 or e5m2, not 'e3m4'"),
        ("int4:ef=2", "ef is 0 or 1, not '2'"),
        ("dithering:k=0", "k is a whole number from 1 to 127, not '0'"),
        ("dithering:k=128", "not '128'"),
        ("dithering:normalize=l1", "normalize is max or l2, not 'l1'"),
        ("dithering:ef=1,k=1", "unsafe inside feedback"),
        ("dithering:ef=1,normalize=l2", "unsafe inside feedback"),
        ("ternary:ef=1", "codec dithering: k=1, normalize=max is unsafe inside feedback"),
        ("ternary:k=1", "unknown parameter 'k'"),
        ("dithering:partition=log", "partition is linear or natural, not 'log'"),
        ("dithering:k=7.0", "not '7.0'"),
        ("dithering:ef=1,k=1,partition=natural", "unsafe inside feedback"),
        ("onebit:scale=2", "scale is block or unit, not '2'"),
        ("onebit:scale=unit", "no contraction.*scale=unit,ef=0"),
        ("onebit:scale=unit,ef=1", "no contraction"),
        ("majority:ef=1", "unknown parameter 'ef'; it takes no parameters"),
        ("tbq:ef=0", "unknown parameter 'ef'; it takes tau"),
        ("tbq:tau=0", "tau is a number from 1e-30 to 1e\\+30, not '0'"),
        ("tbq:tau=auto", "tau=auto is no more; give tau the size .* or use onebit"),
        ("tbq:tau=-1", "not '-1'"),
        ("tbq:tau=nan", "not 'nan'"),
        ("tbq:tau=mean", "not 'mean'"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_work_are_refused_and_say_why(text: str, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        parse_codec(text)


def test_k_given_in_code_is_printed_too() -> None:
    assert TopKCodec(k=Fraction(1, 8)).canonical == "topk:k=0.125"


@pytest.mark.parametrize("name", ["topk", "topk:select=sampled", "blocktopk", "randomk"])
@pytest.mark.parametrize("numel", [0, 1 << 31])
def test_a_part_of_nothing_or_beyond_the_indices_is_refused(name: str, numel: int) -> None:
    with pytest.raises(CodecError, match=f"codec {name.partition(':')[0]} carries parts of 1 to 2147483647 elements, not {numel}"):
        parse_codec(name).payload_bound(numel)


@pytest.mark.parametrize("text", ["topk:k=13", "int8/topk:k=13", "topk:k=13/relay", "randomk:k=13", "blocktopk:block=4,k=4"])
def test_a_count_beyond_the_bucket_is_refused_and_names_codec_parameter_and_tensor(text: str) -> None:
    context = BucketContext(shapes=((2, 4), (4,)))
    with pytest.raises(
        CodecError, match=r"codec \w+: parameter k is 1?\d, but the bucket has only (12 elements|3 blocks of 4).*shape \[2, 4\]"
    ):
        parse_scheme(text, context)
    assert parse_scheme(text.replace("13", "12").replace("k=4", "k=3"), context)


def test_a_list_of_codecs_has_commas_between_codecs_and_between_parameters() -> None:
    assert split_texts("") == split_texts(" , ") == []
    assert split_texts("int8, onebit") == ["int8", "onebit"]
    assert split_texts("int8:ef=0,rotate=1,onebit:ef=0, scale=unit/int8:rotate=1,ef=0,topk:k=0.02,none") == [
        "int8:ef=0,rotate=1", "onebit:ef=0,scale=unit/int8:rotate=1,ef=0", "topk:k=0.02", "none",
    ]  # fmt: skip
    assert split_texts("rotate=1,int8") == ["rotate=1", "int8"], "which the parser then refuses"
