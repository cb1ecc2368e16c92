"""What a job promises after what was done to it, and that each broken promise is seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.launch.chaos.checking import Report
from psgc.launch.chaos.promises import Run, broken, fatal, reference_of, results_of, shrunk, starts_again
from psgc.launch.chaos.running import Blow
from psgc.launch.chaos.schedule import Event

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


ALIKE = Run(0, ["rank 0 found aa", "rank 1 found aa", "rank 2 found aa"])


def test_a_mean_over_the_living_may_have_other_results_that_are_the_same_on_all_ranks() -> None:
    def seen(*said: str, killed: str = "", of: Run = ALIKE) -> list[str]:
        return broken(Run(0, said, killed=killed.split()), of, FOUND, "", shrinks=True)

    assert seen("rank 0 found bb", "[worker 1] rank 1 found bb", killed="2") == []
    assert seen("rank 0 found bb", "rank 1 found cc", "rank 2 found bb") == [
        "ranks' results differ: rank 0 found bb; rank 1 found cc; rank 2 found bb"
    ]
    assert seen("rank 0 found bb", killed="2") == ["rank 1, which was not killed, has printed no result"]
    assert seen(killed="0 1 2") == ["no rank has printed a result"]
    assert seen("rank 0 found cc", "rank 1 found dd", of=REFERENCE) == [], "they differ by themselves"
    untold = Run(0, ["found aa", "found aa"])
    assert seen("found bb", of=untold) == [] and seen("found bb", "found cc", of=untold) == ["ranks' results differ: found bb; found cc"]
    losses = Run(0, [f"rank {rank} found {step}" for step in "abc" for rank in (0, 1)])
    assert seen("rank 0 found x", "rank 1 found y", "rank 0 found z", "rank 1 found z", of=losses) == [], "the last ones"


def test_a_report_says_what_was_kept() -> None:
    """No more than that."""
    blow = Blow(Event(0, "kill", "worker", 0.0, 1.0, False, again="scheduler", again_s=1.0), "worker 1", 0.5)
    assert Report(7, 1, (blow,), ()).lines()[-1] == "kept: results are those of the undisturbed run, bit for bit; nothing is left"
    went_on = Report(7, 1, (blow,), (), shrinks=True).lines()[-1]
    assert (
        went_on
        == "kept: it went on without those that were killed (PSGC_ON_WORKER_LOSS=shrink), so that results may differ, and ranks agree; nothing is left"
    )
    more = replace(blow, again=True, recovered_s=2.0)
    report = Report(7, 2, (blow, more), ())
    assert report.lines()[:2] == ["seed 7: 1 of 2 events happened", "1 more kills while a process came into a killed one's place"]
    assert [(one["kind"], one["role"]) for one in report.to_json()["blows"]] == [("kill", "worker"), ("kill", "scheduler")]
    assert (report.to_json()["happened"], report.to_json()["again"], report.times()) == (1, 1, {"kill scheduler": [2.0]})


def test_where_nothing_was_done_nothing_is_said_to_be_kept() -> None:
    report = Report(7, 5, (), ())
    assert report.lines()[-1] == report.untried == "none of the 5 events happened, so nothing was tried"
    assert not any("kept" in line for line in report.lines())


def test_policies_say_whose_death_ends_a_job() -> None:
    def killed(*roles: str, **env: str) -> Mapping[str, Mapping[str, str]]:
        return dict.fromkeys(roles, env)

    assert fatal(killed("server", "scheduler")) == ""
    assert (
        fatal(killed("server", PSGC_ON_SERVER_LOSS="stop"))
        == fatal(killed("server", PSGC_ON_SERVER_LOSS=" Stop "))
        == "PSGC_ON_SERVER_LOSS=stop"
    )
    assert fatal(killed("server", PSGC_ON_SCHEDULER_LOSS="stop")) == ""
    assert fatal(killed("scheduler", PSGC_ON_SCHEDULER_LOSS="stop")) == "PSGC_ON_SCHEDULER_LOSS=stop"
    assert fatal(killed("worker")) == "a worker's death ends the job"
    for policy in ("wait", "Wait", "shrink", "SHRINK"):
        assert fatal(killed("worker", PSGC_ON_WORKER_LOSS=policy)) == ""
        assert shrunk(killed("worker", PSGC_ON_WORKER_LOSS=policy)) == (policy.lower() == "shrink")
    assert fatal(killed()) == "" and not shrunk(killed("server", PSGC_ON_WORKER_LOSS="shrink"))


def test_a_job_that_is_started_again_may_end_in_order_or_say_why_it_does_not() -> None:
    killed = {"worker": {"PSGC_RESTART": "0"}}
    ends = fatal(killed)
    assert ends and starts_again(killed) and not starts_again({"worker": {}})
    assert broken(Run(0, [*SAID, *SAID]), REFERENCE, FOUND, ends, again=True) == [], "what it prints depends on its checkpoint"
    assert broken(Run(137, SAID[:1], "psgc run: rank 0 was killed"), REFERENCE, FOUND, ends, again=True) == []
    assert "does not say why" in broken(Run(1, (), ""), REFERENCE, FOUND, ends, again=True)[0]
    blow = Blow(Event(0, "kill", "worker", 0.0, 1.0, False), "worker 1", 0.5)
    kept = Report(7, 1, (blow,), (), ends, again=True).lines()[-1]
    assert kept == "kept: it was started again (PSGC_RESTARTS), since a worker's death ends the job, and ended in order; nothing is left"


def test_a_job_that_cannot_be_a_reference_is_refused() -> None:
    with pytest.raises(UsageError, match="the job fails by itself, with status 3: why"):
        reference_of(Run(3, SAID, "why"), FOUND)
    with pytest.raises(UsageError, match="undisturbed, the job has not gone on for 8 s; name lines that it prints, or raise --limit"):
        reference_of(Run(143, SAID, "why"), FOUND, "the job has not gone on for 8 s")
    with pytest.raises(UsageError, match=r"--result 'found \\\\w\+' fits no line"):
        reference_of(Run(0, ["nothing"]), FOUND)


def test_lines_are_compared_from_where_they_fit_and_as_often_as_they_come() -> None:
    assert results_of(Run(0, ["[a] found x", "[b] found x", "no"]), FOUND) == {"found x": 2}
