"""Of several faults, the first cause is reported: a process's own failure before a detected fault, and that before a fault reported by others."""

from __future__ import annotations

import pytest

from psgc.diagnostics.report import Report
from psgc.launch.supervision.blame import Account, Blame

SCHEDULER, SERVER, FIRST, SECOND = range(4)


def job(formed: bool = True) -> Blame:
    blame = Blame([Account("scheduler", True, True), Account("server 0", True), Account("worker 0", False), Account("worker 1", False)])
    for child in (SCHEDULER, SERVER):
        blame.hear(Report(child, "joining"))
    if formed:
        for rank, child in enumerate((FIRST, SECOND)):
            blame.hear(Report(child, "joined", rank=rank))
    return blame


def test_without_a_fault_there_is_no_verdict() -> None:
    blame = job()
    for child in (SECOND, FIRST, SERVER, SCHEDULER):
        blame.end(child, 0, "")
    assert (blame.verdict(), blame.failed) == (None, False)


def test_an_error_of_a_script_is_the_cause_though_its_consequences_end_first() -> None:
    blame = job()
    blame.hear(Report(SECOND, "died", "ValueError: bad batch (train.py:17)", 1))
    blame.hear(Report(SCHEDULER, "job failed", "rank 1 ended with ValueError: bad batch (train.py:17)"))
    blame.hear(Report(SERVER, "job failed", "rank 1 ended with ValueError: bad batch (train.py:17)"))
    blame.end(SERVER, 1, "server 0 (pid 3) ended with status 1")
    blame.end(FIRST, 1, "worker 0 (pid 4) ended with status 1")
    blame.end(SECOND, 1, "worker 1 (pid 5) ended with ValueError: bad batch (train.py:17)")
    assert blame.verdict() == ("rank 1 ended with ValueError: bad batch (train.py:17)", 1)


def test_one_that_ends_with_a_status_is_the_cause_of_what_the_scheduler_finds() -> None:
    blame = job()
    blame.hear(Report(SECOND, "left"))
    blame.hear(Report(SCHEDULER, "job failed", "rank(s) 1 left the job, but barrier 1 awaits them"))
    blame.hear(Report(FIRST, "job failed", "rank(s) 1 left the job, but barrier 1 awaits them"))
    blame.end(FIRST, 1, "worker 0 (pid 4) ended with status 1")
    blame.end(SECOND, 3, "worker 1 (pid 5) ended with status 3")
    assert blame.verdict() == ("worker 1 (pid 5) ended with status 3", 3)


def test_where_every_process_only_heard_of_it_the_scheduler_says_why() -> None:
    blame = job()
    blame.hear(Report(FIRST, "job failed", "step 3 has awaited rank(s) 1"))
    assert not blame.failed, "a worker that hears of a fault elsewhere may do something before it ends"
    blame.hear(Report(SCHEDULER, "job failed", "step 3 has awaited rank(s) 1 for 600 s"))
    assert blame.failed
    blame.end(FIRST, 1, "worker 0 ended")
    assert blame.verdict() == ("step 3 has awaited rank(s) 1 for 600 s", 1)


def test_what_a_worker_heard_from_a_scheduler_elsewhere_is_told_with_the_status_it_ended_with() -> None:
    blame = Blame([Account("worker 0", False)])
    blame.hear(Report(0, "joined", rank=4))
    blame.hear(Report(0, "job failed", "rank 1 ended with status 3"))
    blame.hear(Report(0, "died", "RuntimeError: no job", 4))
    blame.end(0, 7, "worker 0 (pid 1) ended with status 7")
    assert blame.verdict() == ("rank 1 ended with status 3", 7)


@pytest.mark.parametrize("first", [SCHEDULER, SERVER, SECOND])
def test_a_process_killed_by_a_signal_is_the_cause_and_gives_128_and_its_number(first: int) -> None:
    blame = job()
    blame.end(first, -9, "it was killed by SIGKILL")
    blame.hear(Report(FIRST, "job failed", "something died"))
    blame.end(FIRST, 1, "worker 0 ended with status 1")
    assert blame.verdict() == ("it was killed by SIGKILL", 137)


def test_how_those_end_that_we_ended_is_no_fault() -> None:
    blame = job()
    for child in range(4):
        blame.end(child)
    assert blame.verdict() is None


@pytest.mark.parametrize("ends_first", [True, False])
def test_one_that_never_joined_is_named_once_others_wait_for_it(ends_first: bool) -> None:
    blame = job(formed=False)
    steps = [lambda: blame.end(SECOND, 0, ""), lambda: blame.hear(Report(FIRST, "joining"))]
    for step in steps if ends_first else reversed(steps):
        assert not blame.failed
        step()
    assert blame.failed
    text, status = blame.verdict() or ("", 0)
    assert status == 1
    assert text.startswith("worker 1 ended with status 0 and never joined the job")


def test_a_command_that_does_not_use_psgc_fails_nothing_and_is_known() -> None:
    blame = job(formed=False)
    blame.end(FIRST, 0, "")
    assert not blame.unused
    blame.end(SECOND, 0, "")
    assert (blame.unused, blame.verdict()) == (True, None)


def test_reports_of_nobody_we_started_are_passed_over() -> None:
    blame = job()
    blame.hear(Report(17, "died", "a stranger"))
    blame.hear(Report(-1, "died", "a stranger"))
    assert blame.verdict() is None


def test_services_wait_for_nothing_once_they_have_seen_every_job_to_its_end() -> None:
    blame = job()
    assert not blame.unneeded
    for child in (SCHEDULER, SERVER):
        assert not blame.unneeded
        blame.hear(Report(child, "left"))
    assert blame.unneeded
    blame.hear(Report(FIRST, "joining"))
    blame.hear(Report(SCHEDULER, "joining"))
    assert not blame.unneeded, "a worker has begun another job"


def test_a_worker_that_joined_fewer_jobs_is_to_blame_once_it_has_ended_and_others_wait() -> None:
    blame = job()
    blame.end(SECOND, 0, "")
    assert blame.verdict() is None
    blame.hear(Report(FIRST, "joining"))
    text, status = blame.verdict() or ("", 0)
    assert (text[:59], status) == ("worker 1 ended with status 0 and joined 1 job(s), not the n", 1)


def test_a_worker_that_was_cut_off_may_be_followed_and_is_not_the_cause() -> None:
    blame = job()
    blame.hear(Report(SECOND, "cut off", "the scheduler has said nothing for 60 s", 1))
    blame.hear(Report(SECOND, "died", "RuntimeError: of what it was told", 1))
    account = blame.accounts[SECOND]
    assert (blame.cause, account.informed, account.in_job) == (None, False, True)
    account.comes_back()
    assert account.in_job and not account.cut_off, "also before the next one has joined"
