"""The command line ``psgc``: help with an example at every verb, one JSON document where asked, status 2 for wrong usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plan.commands import psgc

VERBS = ((), ("run",), ("doctor",), ("codecs",), ("bench",), ("bench", "kernels"), ("bench", "pushpull"))


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_shows_an_example(verb: tuple[str, ...]) -> None:
    done = psgc(*verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Example: psgc {' '.join(verb)}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arguments", [("run", "--wrokers", "3", "--", "true"), ("trian",), ("bench", "kernels", "--numel", "many")])
def test_an_unknown_verb_option_or_value_is_wrong_usage(launched: Any, arguments: tuple[str, ...]) -> None:
    status, out, err = launched.end(launched.psgc(*arguments))
    assert (status, out) == (2, "")
    assert "Error" in err


def test_codecs_prints_one_json_document_and_nothing_else(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("codecs", "--json"))
    assert (status, err) == (0, "")
    entries = json.loads(out)
    names = {"name", "canonical", "parameters", "ratio_fp32", "ratio_bf16", "unbiased", "feedback", "additive"}
    assert all(set(entry) == names | {"nmse_gaussian", "nmse_heavy", "advice"} for entry in entries)
    assert {"none", "onebit", "int8", "topk"} <= {entry["name"] for entry in entries}


def test_bench_kernels_prints_one_json_document_and_nothing_else(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("bench", "kernels", "--numel", "9000", "--codec", "onebit", "--json"))
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["memcpy_gbps"] > 0
    assert [row["op"] for row in report["codecs"]] == ["encode", "decode", "server"]
    assert all({"codec", "op", "numel", "threads", "gbps", "ns_per_element", "ratio_to_memcpy"} <= set(row) for row in report["codecs"])


def test_bench_pushpull_checks_and_measures_a_real_job(launched: Any) -> None:
    arguments = ("--workers", "2", "--servers", "1", "--bytes", "400000", "--codec", "int8", "--rounds", "3", "--json")
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
