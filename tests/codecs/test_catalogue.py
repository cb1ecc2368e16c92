"""The table of codecs has the promised keys, and measured sizes."""

from __future__ import annotations

from psgc.codecs.catalogue import catalogue
from psgc.codecs.codec import parse_codec, registered_codecs
from psgc.codecs.scheme import parse_scheme, registered_schemes

KEYS = {"name", "canonical", "parameters", "ratio_fp32", "ratio_bf16", "unbiased", "feedback", "additive"}


def test_every_registered_codec_has_one_entry_with_exactly_the_promised_keys() -> None:
    entries = catalogue()
    assert [entry["name"] for entry in entries] == [*registered_codecs(), *registered_schemes()]
    assert all(set(entry) == KEYS for entry in entries)


def test_entries_say_what_the_codecs_say() -> None:
    for entry in catalogue():
        if entry["name"] in registered_schemes():
            assert entry["canonical"] == entry["name"]
            assert entry["feedback"] == parse_scheme(entry["name"]).feedback
            continue
        codec = parse_codec(entry["canonical"])
        text = ",".join(f"{key}={value}" for key, value in entry["parameters"].items())
        assert parse_codec(f"{entry['name']}:{text}").canonical == codec.canonical
        assert (entry["unbiased"], entry["feedback"], entry["additive"]) == (codec.unbiased, codec.feedback, codec.additive)


def test_ratios_are_those_of_the_layouts() -> None:
    ratios = {entry["name"]: entry["ratio_fp32"] for entry in catalogue()}
    assert ratios["none"] == 1
    assert ratios["bf16"] == ratios["fp16"] == 2
    assert ratios["int4"] == round(32 / (4 + 32 / 128), 3)
    assert ratios["shared"] == round(64 / (8 + 16 + 64 / 256), 3)
    assert ratios["powersgd"] == 1024 * 1024 / (4 * 2 * 1024)
    assert ratios["int8"] == round(32 / (8 + 32 / 256), 3)
    assert ratios["onebit"] == round(32 / (1 + 32 / 4096), 3)
    assert 70 < ratios["topk"] < 100  # 32 bits and a gap of 8 to 10, for one element in a hundred


def test_ratios_over_bf16_are_half_of_those_over_fp32() -> None:
    assert all(abs(entry["ratio_bf16"] - entry["ratio_fp32"] / 2) <= 0.001 for entry in catalogue())
