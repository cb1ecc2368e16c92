"""benchmarks/shrinking.py: what it counts, tells and refuses."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.benchmark_scripts import load

script = load("shrinking")


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"),
    [({0: 4}, 300, 0), ({0: 4, 100: 3, 180: 4}, 300, 80), ({0: 4, 100: 3}, 300, 200), ({0: 3, 1: 4, 7: 3}, 9, 3)],
)
def test_steps_are_counted_that_not_all_ranks_took(sizes: dict[int, int], steps: int, expected: int) -> None:
    assert script.fewer(sizes, steps) == expected


def rows(*losses: float) -> list[Any]:
    return [script.Row(number // 2, bool(number % 2), 80 * (number % 2), loss) for number, loss in enumerate(losses)]


def test_the_summary_has_means_and_deviations_of_both(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.summary(rows(2.0, 2.1)) == ""
    assert script.summary(rows(2.0, 2.1, 2.2, 2.3)) == "undisturbed 2.1000 ± 0.1414, 4 -> 3 -> 4 2.2000 ± 0.1414"
    monkeypatch.setattr(script, "measure", lambda seed, steps, disturbed: script.Row(seed, disturbed, 80 * disturbed, 2.0 + seed))
    monkeypatch.setattr(sys, "argv", ["shrinking.py", "--seeds", "0,1", "--json"])
    script.main()
    found = json.loads(capsys.readouterr().out)
    assert [(row["seed"], row["disturbed"], row["fewer"]) for row in found["rows"]] == [
        (0, False, 0),
        (0, True, 80),
        (1, False, 0),
        (1, True, 80),
    ]


@pytest.mark.parametrize(("flags", "told"), [(["--steps", "3"], "expected at least 9"), (["--seeds", "0,x"], "expected numbers")])
def test_what_does_not_fit_is_wrong_usage_in_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shrinking.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
