"""How a claim is judged, and what the harness says of a whole paper."""

from __future__ import annotations

import pytest

from psgc.reproduce import harness
from psgc.reproduce.claims import Bound, Claim, Experiment, Outcome, Unit, Verdict, run, shown


def outcome(expected: float, ours: float | None, unit: Unit = "gain", bound: Bound = "about", *, reason: str = "") -> Outcome:
    measure = None if ours is None else lambda: ours
    (found,) = run(Experiment("t", "s", "u", "m", 0.1, [Claim("c", expected, measure, unit, bound, reason=reason)]))
    return found


@pytest.mark.parametrize(
    ("expected", "ours", "unit", "bound", "verdict"),
    [
        (0.40, 0.50, "gain", "about", "yes"),  # 1.5 / 1.4 is within a tenth
        (0.40, 0.55, "gain", "about", "sign only"),
        (0.02, -0.02, "gain", "about", "no"),  # within a tenth, and of the other sign
        (-0.2, -0.5, "gain", "about", "sign only"),
        (10, 10.9, "ms", "about", "yes"),
        (10, 11.1, "ms", "about", "no"),
        (10, 1, "ms", "at most", "yes"),
        (10, 12, "ms", "at most", "no"),
        (3, 9, "times", "at least", "yes"),
        (3, 2, "times", "at least", "no"),
        (0, -0.05, "gain", "at least", "yes"),
        (0, -0.2, "gain", "at least", "no"),
        (0, 0, "count", "about", "yes"),
        (1, None, "count", "about", "not run"),
    ],
)
def test_a_claim_reproduces_with_its_sign_and_within_its_tolerance(
    expected: float, ours: float | None, unit: Unit, bound: Bound, verdict: Verdict
) -> None:
    found = outcome(expected, ours, unit, bound)
    assert found.verdict == verdict
    assert found.unexplained == (verdict != "yes"), "and whatever does not needs a reason"
    assert not outcome(expected, ours, unit, bound, reason="because").unexplained


def test_the_ratio_of_two_gains_is_that_of_the_throughputs() -> None:
    assert outcome(0.5, 0.8).ratio == pytest.approx(1.2)
    assert outcome(2.0, 5.0, "ms").ratio == pytest.approx(2.5)
    assert outcome(0.0, 5.0, "count").ratio is None


def test_values_are_shown_with_their_units() -> None:
    assert shown(0.425, "gain") == "+42.5%"
    assert shown(17, "ms", "at most") == "<= 17 ms"
    assert shown(None, "ms") == "-"


def test_a_claim_that_differs_for_no_known_reason_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(reason: str) -> None:
        experiment = Experiment(
            "Twice", "nobody 2020", "none", "counted", 0.0, [Claim("one is two", 2, lambda: 1.0, "count", reason=reason)]
        )
        monkeypatch.setattr(harness, "experiments_of", lambda paper: iter([experiment]))

    made("one is one")
    assert harness.main(["utility"]) == 0
    page = capsys.readouterr().out
    assert "| one is two | 2 | 1 | 0.50 | no (a) |" in page
    assert "(a) one is one." in page
    made("")
    assert harness.main(["utility"]) == 1
    assert "one is two: differs, and nothing says why" in capsys.readouterr().err
