"""The command line ``psgc``: help with an example at every verb, one JSON document where asked, status 2 for wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psgc.codecs.catalogue import catalogue
from psgc.launch import verbs
from psgc.launch.cli import VERBS
from psgc.launch.job.bpslaunch import launch
from psgc.launch.tables import print_table
from tests.plan.commands import psgc


def test_help_shows_an_example() -> None:
    for verb in ("", "bench", *(row.name for row in VERBS)):
        done = psgc(*verb.split(), "--help")
        assert (done.returncode, done.stderr) == (0, ""), verb
        assert f"Example: psgc {verb}".rstrip() in " ".join(done.stdout.split()), verb


def test_every_file_of_verbs_is_one_row_of_the_table() -> None:
    files = {path.stem for path in Path(verbs.__file__).parent.glob("*.py")} - {"__init__"}
    assert sorted(row.name.replace(" ", "_") for row in VERBS) == sorted(files)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--wokers", "3", "--", "true"), "psgc run: no such option --wokers; did you mean --workers? see psgc run --help"),
        (("run", "--workers"), "psgc run: option '--workers' requires an argument; see psgc run --help"),
        (("--verbose",), "psgc: no such option --verbose; did you mean --version? see psgc --help"),
        (("docter", "--json"), "psgc: no such verb docter; did you mean doctor? see psgc --help"),
        (("bench", "gpus"), "psgc bench: no such verb gpus; choose one of kernels, pushpull; see psgc bench --help"),
        (("bench", "kernels", "--numel=many"), "psgc bench kernels: --numel many: expected a whole number; see psgc bench kernels --help"),
        (("whatif", "--k", "0.1", "--k", "x"), "psgc whatif: --k x: expected a number; see psgc whatif --help"),
        (("advise", "--nodes", "2"), "psgc advise: --link is missing: Gbit/s of a machine's link, one way; see psgc advise --help"),
        (("codecs", "--json", "--markdown"), "psgc codecs: --json and --markdown exclude each other; give one of them"),
        (
            ("bench", "kernels", "--numel", "9", "--sizes", "1M"),
            "psgc bench kernels: --sizes: --numel 9 is the one size; give one of them",
        ),
        (("codecs", "int8"), "psgc codecs: got unexpected extra argument(s) (int8); see psgc codecs --help"),
    ],
)
def test_an_unknown_verb_flag_or_value_is_one_line_that_says_what_was_meant(arguments: tuple[str, ...], said: str) -> None:
    done = psgc(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


def test_a_flag_given_to_psgc_launch_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--workers", "2"], {}) == 2
    said = capsys.readouterr().err
    assert said == "psgc-launch: no such option --workers; everything but the command comes from the environment: see psgc-launch --help\n"


def test_without_a_verb_the_verbs_are_listed() -> None:
    for words, verb in (((), "doctor"), (("bench",), "kernels")):
        done = psgc(*words)
        assert f"\n  {verb} " in done.stdout + done.stderr


def test_codecs_prints_one_json_document_and_nothing_else(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("codecs", "--json"))
    assert (status, err) == (0, "")
    entries = json.loads(out)
    names = {"name", "canonical", "parameters", "ratio_fp32", "ratio_bf16", "unbiased", "feedback", "additive"}
    assert all(
        set(entry) - {"gpu"} == names | {"nmse_gaussian", "nmse_heavy", "advice"} for entry in entries
    )  # of what was measured on a GPU
    assert {"none", "onebit", "int8", "topk"} <= {entry["name"] for entry in entries}


def test_bench_kernels_prints_one_json_document_and_nothing_else(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("bench", "kernels", "--numel", "9000", "--codec", "onebit", "--json"))
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["memcpy_gbps"] > 0
    assert [row["op"] for row in report["codecs"]] == ["encode", "decode", "server"]
    assert all({"codec", "op", "numel", "threads", "gbps", "ns_per_element", "ratio_to_memcpy"} <= set(row) for row in report["codecs"])


def test_bench_pushpull_checks_and_measures_a_real_job(launched: Any) -> None:
    for servers in ("1", "0"):
        arguments = ("--workers", "2", "--servers", servers, "--bytes", "400000", "--codec", "int8", "--rounds", "3", "--json")
        status, out, err = launched.end(launched.psgc("bench", "pushpull", *arguments))
        assert (status, err) == (0, "")
        report = json.loads(out)
        assert report["checked"] is True
        assert 0 < report["best_ms"] <= report["median_ms"] <= report["p99_ms"]
        assert report["wire_bytes"] < report["bytes"], "int8 both ways is half of fp32 one way"


def test_a_bench_whose_job_cannot_start_says_why_and_fails(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("bench", "pushpull", "--bytes", "400000", PSGC_PART_BYTES="many"))
    assert (status, out) == (1, "")
    assert "PSGC_PART_BYTES='many'" in err.strip().splitlines()[-1]


def test_codecs_breaks_no_word_on_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = psgc("codecs").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    shown = {word.strip(",") for line in lines for word in line.split()}
    for entry in catalogue():
        assert {entry["name"], *(f"{name}={value}" for name, value in entry["parameters"].items())} <= shown


def test_advise_has_one_line_of_headings_on_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = psgc("advise", "--model", "llama-8b", "--gpu", "h100", "--nodes", "8", "--link", "100").stdout.splitlines()
    table = [line for line in lines if line and line[0] in "┏┃┡│└"]
    assert len(table) > 8 and max(map(len, table)) <= 80
    (headings,) = [line for line in table if line[0] == "┃"]
    assert [cell.strip() for cell in headings.split("┃")[2:-2]] == ["now", "not yet", "against bf16", "fewer bytes"]


def test_a_table_breaks_words_only_where_nothing_else_can_give_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["name", "meaning"], [["x" * 12, "some words " * 10], ["y" * 12, "more"]])
    assert "x" * 12 in capsys.readouterr().out
    print_table(["name", "meaning"], [["x" * 50, "w" * 50]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40 and out.count("x") == out.count("w") == 50
