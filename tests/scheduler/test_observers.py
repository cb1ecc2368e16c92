"""An observer learns how the job does; it is no member, costs little, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psgc import __version__
from psgc.errors import RemoteProtocolError
from psgc.observe.live import Follower, Row, view
from psgc.scheduler import view as made_view
from psgc.scheduler.actions import Send
from psgc.wire.frames import Kind
from psgc.wire.messages import Notice, decode_json
from psgc.wire.reports import Observed, Report, ReportOf, report_of
from tests.scheduler.talk import Job, complete, sent

REPORT = Report(10_000, 5_000_000, 40, 25_000, 4_000, 1_000, 1_000, 4_000)


def observe(job: Job, peer: str = "o") -> Observed:
    (answer,) = job.say(peer, Kind.OBSERVE)
    assert isinstance(answer, Send)
    assert (answer.peer, answer.header.kind) == (peer.encode(), Kind.OBSERVE)
    return Observed.from_body(decode_json(answer.body, "OBSERVE"))


def test_an_observer_sees_who_is_there_before_and_after_the_job_is_complete() -> None:
    job = Job()
    assert observe(job) == Observed(job.membership.job, __version__, 0, 0, False, ())
    job = complete()
    job.now += 1
    seen = observe(job)
    assert seen.complete
    assert [(member.role, member.index, member.report, member.silent_ms) for member in sorted(seen.members, key=lambda m: (m.role, m.index))] == [
        ("server", 0, {}, 1000), ("worker", 0, {}, 1000), ("worker", 1, {}, 1000),
    ]  # fmt: skip


def test_reports_reach_observers_and_get_no_answer() -> None:
    job = complete()
    assert job.say("w0", Kind.REPORT, REPORT) == []
    (first,) = [member for member in observe(job).members if (member.role, member.index) == ("worker", 0)]
    assert report_of(first) == REPORT


def test_a_report_that_no_member_would_send_is_refused_and_the_job_goes_on() -> None:
    job = complete()
    for body in (b"{}", b"[", b"", {**dict.fromkeys(("up_ms", "wire_bytes"), 0)}):
        refused = sent(job.say("w0", Kind.REPORT, body), Kind.ERROR)
        assert "scheduler: " in refused["w0"]["text"]
    with pytest.raises(RemoteProtocolError, match=r"Report\.steps is -1"):
        replace(REPORT, steps=-1)
    assert "register first" in sent(job.say("stranger", Kind.REPORT, REPORT), Kind.ERROR)["stranger"]["text"]
    assert observe(job).complete


def test_however_many_ask_the_answer_is_made_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    job, made = complete(), []
    original = made_view.encode_body
    monkeypatch.setattr(made_view, "encode_body", lambda body: made.append(body) or original(body))
    for number in range(500):
        observe(job, f"o{number}")
        job.now += 0.001
    assert len([body for body in made if isinstance(body, Observed)]) == 3
    assert len(list(job.membership.roster)) == 3, "nobody was admitted"


def test_observers_are_not_told_of_the_jobs_end_and_after_a_failure_get_its_reason() -> None:
    job = complete()
    observe(job)
    told = sent(job.say("w1", Kind.FAULT, Notice(0, "as the test wants it")), Kind.ABORT)
    assert set(told) == {"w0", "w1", "s0"}
    assert sent(job.say("o", Kind.OBSERVE), Kind.ABORT) == {"o": {"code": 0, "text": "as the test wants it"}}
    assert "another job" in sent(complete().say("o", Kind.OBSERVE, job=3), Kind.ERROR)["o"]["text"]


def observed(*members: tuple[str, int, Report | None]) -> Observed:
    def plain(report: Report | None) -> dict[str, Any]:
        return {} if report is None else {name: getattr(report, name) for name in Report.__dataclass_fields__}

    rows = tuple(ReportOf(role, index, "here", 1, False, 0, plain(report)) for role, index, report in members)  # type: ignore[arg-type]
    return Observed(1, "v", 2, 1, True, rows)


def figures(row: Row, *names: str) -> tuple[float | None, ...]:
    return tuple(map(row.number, names))


def test_rates_are_between_a_members_last_two_reports() -> None:
    server = Report(10_000, 10_000_000, busy_ms=5_000, threads=2)
    other = replace(REPORT, waited_ms=2_000)
    follower = Follower()
    seen = follower.see(observed(("server", 0, server), ("worker", 1, other), ("worker", 0, REPORT)))
    assert [(row.role, row.index) for row in seen.rows] == [("worker", 0), ("worker", 1), ("server", 0)]
    first, second, third = seen.rows
    assert figures(first, "steps", "step_ms", "bytes_per_s", "waits", "ratio", "overlap") == (40, 25.0, 500_000.0, 0.1, 4.0, 0.75)
    assert figures(second, "waits", "overlap") == (0.2, 0.5)
    assert third.number("load") == 0.25
    assert (seen.slowest_rank, seen.steps, seen.median("step_ms")) == (0, 40, 25.0)
    later = replace(REPORT, up_ms=11_000, wire_bytes=7_000_000, steps=80, step_us=20_000, exchange_ms=4_500, waited_ms=1_000, gradient_bytes=2_000,
                    uncompressed_bytes=6_000)  # fmt: skip
    for _ in range(2):  # the same report again changes no rate
        first = follower.see(observed(("worker", 0, later), ("worker", 1, other), ("server", 0, server))).rows[0]
        assert figures(first, "steps", "step_ms", "bytes_per_s", "waits", "ratio", "overlap") == (80, 20.0, 2e6, 0.0, 2.0, 1.0)


def test_what_is_not_known_is_left_out_and_equal_ranks_are_not_blamed() -> None:
    seen = view(observed(("worker", 0, None), ("worker", 1, Report(0, 0)), ("server", 0, None)))
    assert all(value is None for row in seen.rows for value in figures(row, "bytes_per_s", "waits", "load"))
    assert seen.slowest_rank is None
    assert view(observed(("worker", 0, REPORT), ("worker", 1, replace(REPORT, waited_ms=1_100)))).slowest_rank is None
