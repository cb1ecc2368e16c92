"""The tour, with few steps: its commands run, and its page has what they printed and their charts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parent.parent / "examples" / "tour.py"
WAIT_S = 280


@pytest.mark.long  # two minutes; make test-integrations runs the same tour as a notebook
def test_the_tour_runs_its_commands_and_writes_a_page_with_their_charts(tmp_path: Path) -> None:
    command = [sys.executable, str(TOUR), "--steps", "4", "--link-mbit", "100", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    for words in (
        "psgc advise --model gpt2",
        "psgc whatif --profile gpt2",
        "psgc plan --profile bert-base",
        "--codec onebit",
        "<th>faster",
    ):
        assert words in page, words
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert (tmp_path / name).stat().st_size > 1000, name
    none, *others = json.loads((tmp_path / "tour.json").read_text())
    assert none["codec"] == "none"
    for record in others:
        assert record["wire_bytes_per_step_per_worker"] < none["wire_bytes_per_step_per_worker"] / 3


def test_too_few_steps_are_refused() -> None:
    done = subprocess.run([sys.executable, str(TOUR), "--steps", "2"], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert "--steps 2: at least 3" in done.stderr
