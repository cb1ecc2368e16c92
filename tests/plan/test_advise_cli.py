"""``psgc advise`` and the timeline's ``psgc whatif``, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.plan.commands import psgc

ON_CPUS = "codec times of int8 on CPUs are estimates: what one core of an AMD EPYC took"


def test_advice_is_one_document_or_a_table_and_a_sentence() -> None:
    command = ("advise", "--model", "gpt2", "--gpu", "a100", "--nodes", "4", "--link", "10")
    done = psgc(*command, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"verdict", "gain", "margin", "why", "candidates"} <= found.keys()
    shown = psgc(*command).stdout
    assert found["why"] in shown
    assert all(f"│ {one['name']} " in shown for one in found["candidates"])


def test_advice_from_a_profile(tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    table.write_text("name,numel,ready_us\nb,1000000,0\na,5000000,3000\n")
    done = psgc("advise", "--profile", str(table), "--nodes", "2", "--gpus-per-node", "1", "--link", "1", "--gpu", "t4", "--json")
    assert done.returncode == 0, done.stderr
    assert any("no forward time" in note for note in json.loads(done.stdout)["notes"])


def test_advice_where_all_gradients_are_ready_at_once(tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    table.write_text("name,numel,ready_us\nb,1000000,0\na,5000000,0\n")
    done = psgc("advise", "--profile", str(table), "--nodes", "4", "--gpus-per-node", "1", "--link", "1")
    assert done.returncode == 0, done.stderr
    assert "All gradients are ready at once" in done.stdout


def test_the_board_that_a_profile_was_measured_on_is_the_one_that_is_advised_for(tmp_path: Path) -> None:
    table = {"name": "w", "numel": 20_000_000, "ready_us": 0.0}
    path = tmp_path / "profile.json"
    profile = {
        "version": 1,
        "model": "m",
        "hardware": "NVIDIA H100 80GB HBM3, Intel Xeon 8480, 52 cores",
        "device": "cuda",
        "date": "",
        "unit": "us",
    }
    path.write_text(json.dumps({**profile, "source": "measured", "forward_us": 1000.0, "tensors": [table], "codecs": {}}))
    command = ("advise", "--profile", str(path), "--nodes", "4", "--gpus-per-node", "8", "--link", "25", "--json")
    measured, named = (json.loads(psgc(*command, *more).stdout) for more in ((), ("--gpu", "h100")))
    assert measured["candidates"] == named["candidates"]


def test_the_timeline_is_asked_with_a_profile_and_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = psgc(
        "whatif", "--profile", "resnet50", "--cluster", "espresso-pcie", "--codec", "onebit", "--plot", str(tmp_path / "out.png"), "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "onebit at 25 Gbit/s on 8 x 8 GPUs" in found["verdict"]
    assert len(found["trade_off"]) == 25
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_timeline_assumes_what_a_plan_does_and_says_so(tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    table.write_text("name,numel,ready_us\nb,1000000,0\na,5000000,3000\n")
    where = "gradients are taken to lie on a GPU, since "
    for arguments, notes in (
        (("--profile", str(table), "--codec", "onebit"), [where, "codec times are the published ones of V100 and its host, since the profile has none"]),
        (("--profile", str(table), "--codec", "int8", "--gpu", "t4"),
         [where, "codec times of int8 are estimates: bytes moved at 70% of the 300 GB/s", ON_CPUS]),
        (("--profile", "lstm", "--gpu", "h100"), ["profile lstm: computed for h100", "codec times of int8 are estimates", ON_CPUS]),
    ):  # fmt: skip
        done = psgc("whatif", "--cluster", "espresso-pcie", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)["notes"]
        assert len(said) == len(notes)
        assert all(note.startswith(start) for note, start in zip(said, notes, strict=True))
    assert (
        "note: codec times are the published"
        in psgc("whatif", "--cluster", "espresso-pcie", "--profile", str(table), "--codec", "onebit").stdout
    )


def test_wrong_usage_is_one_line_and_status_2() -> None:
    for arguments, words in (
        (("advise", "--nodes", "2", "--link", "1"), "give either --model or --profile"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2"), "--gpu is missing"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "z80"), "unknown GPU 'z80'"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "t4", "--tokens", "0"), "--tokens 0"),
        (("advise", "--nodes", "0", "--link", "1", "--model", "gpt2", "--gpu", "t4"), "field nodes is 0"),
        (("advise", "--nodes", "2", "--link", "0", "--model", "gpt2", "--gpu", "t4"), "field inter.gbps is 0"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "t4", "--memory", "-1"), "--memory -1"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "t4", "--memory", "inf"), "--memory inf"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "1e300"), "unknown GPU '1e300'"),
        (("advise", "--nodes", "2", "--link", "1", "--model", "gpt2", "--gpu", "t4", "--optimizer", "lion"), "choose one of adam, sgd"),
        (("whatif", "--profile", "gpt2"), "--cluster is missing"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--cluster", "espresso-pcie"), "--cluster: only with --profile"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--grad-mib", "4"), "both say how large"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--measured-ms", "nan"), "--measured-ms nan"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--method", "mstopk", "--k", "2"), "--k 2: expected"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--plot", "nowhere/out.png"), "--plot nowhere/out.png: No such file"),
        (("whatif", "--profile", "gpt2", "--cluster", "moon"), "cluster 'moon' is neither a file nor one of"),
        (("whatif", "--profile", "gpt2", "--cluster", "espresso-pcie", "--over", "fp8"), "choose one of fp32, bf16"),
        (("whatif", "--profile", "gpt2", "--model", "gpt2"), "--model: for the closed model, but --profile asks the timeline"),
        (("whatif", "--profile", "gpt2", "--method", "powersgd", "--gpus", "64"), "whatif: --method and --gpus: for the closed model"),
        (("whatif", "--cases", "x.json", "--gpus", "64", "--plot", "x.png"), "--gpus and --plot: the questions in --cases have inputs of"),
        (("whatif", "--model", "gpt2", "--backward-ms", "1", "--k", "0.1"), "--k: not for --method powersgd; --k is for mstopk"),
    ):
        done = psgc(*arguments)
        assert done.returncode == 2, arguments
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert not done.stdout


def test_the_table_of_the_rule_of_thumb_is_what_advise_says() -> None:
    """In docs/paying.md, to as many digits as stand there: two of its rows, and the example above it."""
    page = (Path(__file__).parents[2] / "docs" / "paying.md").read_text()
    for link in ("400", "25"):
        (cells,) = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith(f"| {link} | ")]
        advice = json.loads(psgc("advise", "--model", "llama-8b", "--gpu", "h100", "--nodes", "8", "--link", link, "--json").stdout)
        takes = {each["name"]: each["iteration_ms"] / 1e3 for each in advice["candidates"]}
        assert cells[3] == advice["choice"]
        for cell, name in zip(cells[4:7], ("none", "bf16", "int4"), strict=True):
            assert float(cell.split()[0]) == pytest.approx(takes[name], rel=0.03), (link, name)
    said = psgc("advise", "--model", "llama-8b", "--gpu", "h100", "--nodes", "8", "--link", "100", "--quality", "safe").stdout
    example = next(line.strip() for line in page.splitlines() if line.startswith("    int4: A bf16 all-reduce"))
    now = next(line for line in said.splitlines() if line.startswith("int4: "))
    without_margins = [re.sub(r",|[+]-[0-9]+%", "", line) for line in (example, now)]  # the search here is a short one
    stands, told = ([float(number) for number in re.findall(r"\d+(?:[.]\d+)?", line)] for line in without_margins)
    assert stands == pytest.approx(told, rel=0.03)
