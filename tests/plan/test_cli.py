"""The verbs that ask, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def psgc(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "psgc.launch", *arguments], capture_output=True, text=True, check=False)


def test_options_are_counted_and_listed() -> None:
    found = json.loads(psgc("options", "--json").stdout)
    assert {key: found[key] for key in ("count", "gpu_only", "uncompressed")} == {"count": 4341, "gpu_only": 174, "uncompressed": 9}
    assert len({tuple(option) for option in found["options"]}) == 4341
    assert json.loads(psgc("options", "--gpu-only", "--json").stdout)["count"] == 174
    assert "flat.push  flat.pull" in psgc("options", "--most-encodes", "0", "--servers").stdout


def test_a_question_gets_a_verdict() -> None:
    command = ("whatif", "--model", "resnet50", "--method", "powersgd", "--backward-ms", "122", "--encode-ms", "45", "--bandwidth", "1")
    done = psgc(*command)
    assert done.returncode == 0, done.stderr
    assert "pays" in done.stdout
    assert json.loads(psgc(*command, "--json").stdout)["gain"] > 0.8


def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"cases": [{"id": "A7", "quantity": "time_ms", "inputs": {"run": {"method": "sync"}}, "expect": {}}]}')
    for arguments, words in (
        (("whatif", "--cases", str(bad)), "case A7: field inputs.run.t_backward_ms: missing"),
        (("whatif", "--cases", str(tmp_path / "none.json")), "No such file"),
        (("whatif", "--model", "resnet50"), "--backward-ms is missing"),
        (("options", "--most-encodes", "-1"), "expected at least 0"),
    ):
        done = psgc(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert not done.stdout
