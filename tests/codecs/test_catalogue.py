"""The table of codecs has the promised keys and measured figures, and the page that is made of it is up to date."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from psgc.codecs import figures
from psgc.codecs.catalogue import catalogue, measured_figures
from psgc.codecs.registry import kit_codecs, parse_codec, parse_scheme, registered_codecs, registered_schemes
from psgc.launch.pages import codecs as codecsdoc
from psgc.launch.pages.codecs import advice_table, codec_table, main, nmse_text, render_codecs, render_speeds, section, with_section

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"
KEYS = {
    "name", "canonical", "parameters", "ratio_fp32", "ratio_bf16", "unbiased", "feedback", "additive", "nmse_gaussian", "nmse_heavy", "advice",
}  # fmt: skip


@pytest.fixture(scope="module")
def entries() -> list[dict[str, Any]]:
    return catalogue()


@pytest.fixture(scope="module")
def by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in entries}


def test_every_registered_codec_has_one_entry_with_exactly_the_promised_keys(entries: list[dict[str, Any]]) -> None:
    assert [entry["name"] for entry in entries] == [*registered_codecs(), *registered_schemes(), *kit_codecs()]
    assert all(set(entry) == KEYS for entry in entries)


def test_the_kept_figures_are_those_that_the_kernels_give_on_this_machine() -> None:
    kept = Path(figures.__file__).read_text()
    assert kept == codecsdoc.render_figures(measured_figures()), "run: python -m psgc.launch.pages.codecs --figures"


def test_the_command_that_measures_the_figures_rewrites_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Path(figures.__file__).read_text()
    monkeypatch.setattr(figures, "__file__", str(tmp_path / "figures.py"))
    monkeypatch.setattr(codecsdoc, "measured_figures", lambda: figures.FIGURES)
    assert codecsdoc.main(["--figures"]) == 0
    assert (tmp_path / "figures.py").read_text() == kept


def test_entries_say_what_the_codecs_say(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        text = ",".join(f"{key}={value}" for key, value in entry["parameters"].items())
        codec = (parse_scheme if entry["name"] in (*registered_schemes(), "sparseloco", "demo") else parse_codec)(f"{entry['name']}:{text}")
        assert codec.canonical == entry["canonical"]
        assert (entry["unbiased"], entry["feedback"], entry["additive"]) == (codec.unbiased, codec.feedback, codec.additive)


def test_schemes_say_themselves_whether_they_are_unbiased_and_additive() -> None:
    said = {text: (parse_scheme(text).unbiased, parse_scheme(text).additive) for text in ("shared", "shared:ef=0", "powersgd", "none")}
    assert said == {"shared": (False, True), "shared:ef=0": (True, True), "powersgd": (False, True), "none": (True, True)}
    pairs = {
        text: (parse_scheme(text).unbiased, parse_scheme(text).additive) for text in ("int8:ef=0", "int8:ef=0/bf16", "int8:ef=0/relay")
    }
    assert pairs == {"int8:ef=0": (True, False), "int8:ef=0/bf16": (False, False), "int8:ef=0/relay": (True, False)}


def test_every_codec_says_when_to_use_it_in_one_line(entries: list[dict[str, Any]]) -> None:
    missing = [entry["name"] for entry in entries if not entry["advice"]]
    assert not missing, f"give these classes an `advice`: {', '.join(missing)}"
    assert all("\n" not in entry["advice"] and "|" not in entry["advice"] and len(entry["advice"]) <= 160 for entry in entries)


def test_ratios_are_those_of_the_layouts(by_name: dict[str, dict[str, Any]]) -> None:
    ratios = {name: entry["ratio_fp32"] for name, entry in by_name.items()}
    assert ratios["none"] == 1
    assert ratios["bf16"] == ratios["fp16"] == 2
    assert ratios["int4"] == round(32 / (4 + 32 / 128), 3)
    assert ratios["shared"] == round(64 / (8 + 16 + 64 / 256), 3)
    assert ratios["powersgd"] == 1024 * 1024 / (4 * 2 * 1024)
    assert ratios["int8"] == round(32 / (8 + 32 / 256), 3)
    assert ratios["onebit"] == round(32 / (1 + 32 / 4096), 3)
    assert 70 < ratios["topk"] < 100  # 32 bits and a gap of 8 to 10, for one element in a hundred


def test_ratios_over_bf16_are_half_of_those_over_fp32(entries: list[dict[str, Any]]) -> None:
    assert all(abs(entry["ratio_bf16"] - entry["ratio_fp32"] / 2) <= 0.001 for entry in entries)


def test_errors_are_those_that_theory_gives(by_name: dict[str, dict[str, Any]]) -> None:
    gaussian = {name: entry["nmse_gaussian"] for name, entry in by_name.items()}
    assert gaussian["none"] == 0
    assert gaussian["onebit"] == pytest.approx(1 - 2 / math.pi, rel=0.01)
    # rounding to bf16 errs by up to 2^-9 of the power of two below p, uniformly: 2^-18 / 3 of its square, which is p^2 / 1.9 or so
    assert gaussian["bf16"] == pytest.approx(2.0**-18 / 3 * 2.2, rel=0.1)
    assert gaussian["shared"] == gaussian["int8"], "of one worker, whose scales are its own"
    assert 0.99 < gaussian["powersgd"] < 1, "noise has no strong directions"
    assert all(entry["nmse_heavy"] > entry["nmse_gaussian"] for name, entry in by_name.items() if name in ("int8", "int4", "onebit"))
    assert by_name["topk"]["nmse_heavy"] < gaussian["topk"]


def test_the_page_has_the_tables_of_this_version(entries: list[dict[str, Any]]) -> None:
    assert section(PAGE.read_text(), "codecs") == render_codecs(entries), "run: python -m psgc.launch.pages.codecs docs/codecs.md"


def test_the_tables_say_which_parameter_makes_a_codec_unbiased_or_keeps_a_residual(entries: list[dict[str, Any]]) -> None:
    header, rows = codec_table(entries)
    said = {row[0]: (row[header.index("unbiased")], row[header.index("residual")]) for row in rows}
    assert said["none"] == ("yes", "no")
    assert said["int8"] == ("with ef=0", "yes")
    assert said["dithering"] == ("yes", "with ef=1")
    assert [row[0] for row in advice_table(entries)[1]] == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.363, "0.36"), (57.4, "57"), (0.0138, "0.014"), (4.96e-5, "5.0e-5"), (1e-12, "1.0e-12")]
)
def test_errors_are_written_with_two_digits(value: float, text: str) -> None:
    assert nmse_text(value) == text


def test_the_page_has_speeds_with_the_command_and_the_machine() -> None:
    speeds = section(PAGE.read_text(), "speeds")
    assert codecsdoc.SPEEDS_COMMAND in speeds
    assert "cores, Python" in speeds


def test_one_command_rewrites_the_generated_sections_and_nothing_else(
    tmp_path: Path, entries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"codec": "none", "implementation": "psgc", "op": "encode", "numel": 1 << 20, "ratio_to_memcpy": 1.25, "ns_per_element": 0.123}
    result = {"codecs": [row], "memcpy_gbps": 8.0, "machine": "a machine", "left_out": {"torch.compile": "no compiler"}}
    monkeypatch.setattr(codecsdoc, "bench_kernels", lambda *arguments, **settings: result)
    page, before = tmp_path / "codecs.md", PAGE.read_text()
    page.write_text(with_section(with_section(before, "codecs", "old"), "speeds", "old"))
    assert main([str(page)]) == 0
    assert (section(page.read_text(), "codecs"), section(page.read_text(), "speeds")) == (render_codecs(entries), "old")
    assert main([str(page), "--speeds"]) == 0
    speeds = section(page.read_text(), "speeds")
    assert speeds == render_speeds(result)
    assert "a machine; measured by" in speeds and "Without torch.compile: no compiler." in speeds and "| `none` | 1.25 |" in speeds
    assert with_section(page.read_text(), "speeds", section(before, "speeds")) == with_section(before, "codecs", render_codecs(entries))


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--speeds", "c"]])
def test_the_command_says_how_it_is_used(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: python -m psgc.launch.pages.codecs" in capsys.readouterr().err
