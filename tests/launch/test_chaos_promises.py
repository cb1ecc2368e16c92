"""What a job promises after what was done to it, and that each broken promise is seen."""

from __future__ import annotations

import re

import pytest

from psgc.errors import UsageError
from psgc.launch.chaos.checking import Report
from psgc.launch.chaos.promises import Run, broken, fatal, reference_of, results_of

FOUND = re.compile(r"found \w+")
SAID = ["[worker 0] step 1", "[worker 0] rank 0 found aa", "[worker 1] rank 1 found bb"]
REFERENCE = reference_of(Run(0, SAID), FOUND)


def test_a_run_with_the_same_results_keeps_what_was_promised_in_whatever_order_ranks_speak() -> None:
    assert broken(Run(0, SAID[::-1]), REFERENCE, FOUND, "") == []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(0, [*SAID[:2], "[worker 1] rank 1 found bc"]), "results differ: undisturbed found bb, disturbed found bc"),
        (Run(0, SAID[:2]), "results differ: undisturbed found bb, disturbed nothing more"),
        (Run(0, [*SAID, SAID[1]]), "results differ: undisturbed nothing more, disturbed found aa"),
        (Run(1, SAID, "psgc run: why"), "the job ended with status 1: psgc run: why"),
        (Run(0, SAID, left=["pid 7"]), "a process was left: pid 7"),
    ],
)
def test_one_that_goes_on_by_its_policies_must_end_in_order_with_the_same_results_and_leave_nothing(run: Run, words: str) -> None:
    assert broken(run, REFERENCE, FOUND, "") == [words]


def test_one_that_ends_by_its_policies_must_say_why() -> None:
    assert broken(Run(137, SAID[:1], "psgc run: rank 0 was killed"), REFERENCE, FOUND, "stop") == []
    assert broken(Run(0, SAID), REFERENCE, FOUND, "PSGC_X=stop") == ["the job ended in order, but PSGC_X=stop"]
    assert "does not say why" in broken(Run(1, (), ""), REFERENCE, FOUND, "stop")[0]
    assert broken(Run(1, (), "why", ["pid 1"]), REFERENCE, FOUND, "stop") == ["a process was left: pid 1"]


def test_a_mean_over_the_living_may_have_other_results() -> None:
    assert broken(Run(0, ["found other"]), REFERENCE, FOUND, "", shrinks=True) == []


def test_a_report_says_what_was_kept() -> None:
    """No more than that."""
    assert Report(7, 0, (), ()).lines()[-1] == "kept: results are those of the undisturbed run, bit for bit; nothing is left"
    went_on = Report(7, 0, (), (), shrinks=True).lines()[-1]
    assert (
        went_on
        == "kept: it went on without those that were killed (PSGC_ON_WORKER_LOSS=shrink), so that results may differ; nothing is left"
    )


def test_policies_say_whose_death_ends_a_job() -> None:
    assert fatal({"server", "scheduler"}, {}) == ""
    assert fatal({"server"}, {"PSGC_ON_SERVER_LOSS": "stop"}) == "PSGC_ON_SERVER_LOSS=stop"
    assert fatal({"server"}, {"PSGC_ON_SCHEDULER_LOSS": "stop"}) == ""
    assert fatal({"scheduler"}, {"PSGC_ON_SCHEDULER_LOSS": "stop"}) == "PSGC_ON_SCHEDULER_LOSS=stop"
    assert fatal({"worker"}, {}) == "a worker's death ends the job"
    assert fatal({"worker"}, {"PSGC_ON_WORKER_LOSS": "wait"}) == fatal({"worker"}, {"PSGC_ON_WORKER_LOSS": "shrink"}) == ""
    assert fatal(set(), {"PSGC_ON_SERVER_LOSS": "stop"}) == ""


def test_a_job_that_cannot_be_a_reference_is_refused() -> None:
    with pytest.raises(UsageError, match="the job fails by itself, with status 3: why"):
        reference_of(Run(3, SAID, "why"), FOUND)
    with pytest.raises(UsageError, match=r"--result 'found \\\\w\+' fits no line"):
        reference_of(Run(0, ["nothing"]), FOUND)


def test_lines_are_compared_from_where_they_fit_and_as_often_as_they_come() -> None:
    assert results_of(Run(0, ["[a] found x", "[b] found x", "no"]), FOUND) == {"found x": 2}
