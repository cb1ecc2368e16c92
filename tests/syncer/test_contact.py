"""A syncer that a learner does not reach is named, and whoever waits for it gives up in the end, however often the connection is made again."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import JobFailed
from psgc.wire.learners import Enrol
from psgc.worker.learner import client as client_module
from psgc.worker.learner.client import LearnerClient
from psgc.worker.learner.contact import Contact, Silence, Wait
from tests.ports import free_port

SILENCE_S, LIMIT_S, ABSENT_S = 5.0, 600.0, 10_000.0


def breaking(
    every_s: float, answers: Literal["nothing", "enrolled", "all"], until: float = 2000.0
) -> tuple[list[float], tuple[float, str] | None]:
    """The connection breaks every so many seconds, from second 10 on, and is made again half a second later. Returns when that was said, and how long whoever
    waited has waited, with the reason, if that came to an end."""
    contact, named, now = Contact(0.0), list[float](), 1.0
    contact.answered(now, progress=True)
    down = up = None
    down = 10.0
    while now < until:
        now += 0.25
        contact.tick(now)
        if now == down:
            contact.down(now)
            up = now + 0.5
        if now == up:
            down = now + every_s - 0.5
            if answers != "nothing":
                contact.answered(now, progress=answers == "all")
        if contact.due(now, SILENCE_S) is not None:
            named.append(now)
        if (late := contact.late(now, LIMIT_S, 0.0)) is not None:
            return named, late
    return named, None


@pytest.mark.parametrize("every_s", [2.0, 4.0, 30.0])
@pytest.mark.parametrize("answers", ["nothing", "enrolled"])
def test_a_connection_that_breaks_again_and_again_before_what_is_awaited_came_through_is_no_contact(
    every_s: float, answers: Literal["nothing", "enrolled"]
) -> None:
    named, late = breaking(every_s, answers)
    assert named[0] <= 10.0 + SILENCE_S + 2 * every_s
    assert len(named) < 20, "ever more rarely"
    assert late is not None
    assert LIMIT_S < late[0] <= LIMIT_S + 0.25
    assert late[1].startswith(", to which the connection broke ") and late[1].endswith(" and nothing came through")


def test_one_on_which_what_is_awaited_comes_through_is() -> None:
    assert breaking(4.0, "all") == ([], None)


def test_one_that_is_slow_is_not_late_and_one_that_is_down_is() -> None:
    contact = Contact(0.0)
    contact.answered(1.0, progress=True)
    contact.down(10.0)
    assert contact.due(14.0, SILENCE_S) is None
    assert contact.due(15.0, SILENCE_S) == 5.0
    contact.answered(20.0, progress=False)
    assert contact.due(2000.0, SILENCE_S) is None and contact.late(2000.0, LIMIT_S, 0.0) is None, "what is awaited may take its time"
    contact.down(2000.0)
    assert contact.late(2600.0, LIMIT_S, 0.0) is None
    assert contact.late(2601.0, LIMIT_S, 0.0) == (601.0, "")


def test_whoever_begins_to_wait_after_a_long_time_without_the_syncer_waits_for_as_long_as_anybody() -> None:
    contact = Contact(0.0)
    contact.answered(1.0, progress=True)
    contact.down(10.0)
    assert contact.late(90_000.0, LIMIT_S, 89_990.0) is None
    assert contact.late(90_591.0, LIMIT_S, 89_990.0) == (601.0, "")


def test_what_moves_is_no_silence_and_what_stands_still_is_named() -> None:
    silence = Silence()
    assert [silence.due(now, 1000, 0, 60.0) for now in (0.0, 100.0)] == [None, None], "nothing is awaited"
    assert [at for at in range(100, 400) if silence.due(at, 1000, 1, 60.0) is not None] == [160, 220, 280, 340]
    assert [at for at in range(400, 600) if silence.due(at, at, 1, 60.0) is not None] == [], "bytes move"
    assert silence.due(700.0, 599, 1, 60.0) == 101.0
    assert silence.due(701.0, 599, 2, 60.0) is None, "another push has left"


def test_one_that_never_came_about_counts_from_the_beginning() -> None:
    contact = Contact(100.0)
    assert contact.due(105.0, SILENCE_S) == 5.0
    assert contact.late(701.0, LIMIT_S, 100.0) == (601.0, "")


def test_a_wait_is_named_soon_and_then_ever_more_rarely() -> None:
    wait = Wait(0, 100.0)
    assert [at for at in range(100, 200) if wait.due(at, SILENCE_S) is not None] == [105, 115, 135, 175]
    assert Wait(0, 100.0).due(106.0, SILENCE_S) == 6.0


@pytest.mark.parametrize("happened", ["never reached", "down", "breaks again and again"])
def test_time_in_which_the_learner_did_not_run_counts_in_no_limit_and_in_no_line(happened: str) -> None:
    contact, wait, now = Contact(0.0), Wait(0, 0.0), 0.25
    contact.tick(now, wait)
    if happened != "never reached":
        contact.answered(now, progress=True)
        contact.down(now)
    for _ in range(4 if happened == "breaks again and again" else 0):
        contact.answered(now, progress=False)
        contact.down(now)
    now += ABSENT_S
    contact.tick(now, wait)
    assert contact.late(now, LIMIT_S, wait.began) is None
    assert contact.due(now, SILENCE_S) is None and wait.due(now, SILENCE_S) is None
    lates = list[tuple[float, str] | None]()
    while not lates or lates[-1] is None:
        now += 0.25
        contact.tick(now, wait)
        lates.append(contact.late(now, LIMIT_S, wait.began))
    assert LIMIT_S - 1 <= now - ABSENT_S <= LIMIT_S + 1


def test_nothing_is_silent_while_the_learner_does_not_run() -> None:
    contact, silence = Contact(0.0), Silence()
    assert silence.due(0.0, 1000, 1, 60.0) is None
    contact.tick(ABSENT_S, silence)
    assert silence.due(ABSENT_S, 1000, 1, 60.0) is None
    assert silence.due(ABSENT_S + 60.0, 1000, 1, 60.0) == 60.0


def test_whoever_waits_for_a_syncer_and_was_stopped_waits_for_as_long_as_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its threads goes on first."""
    seconds = itertools.count()
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: (n := next(seconds)) * 0.3 + ABSENT_S * (n > 12)))
    ones = np.ones(3, np.float32).view(np.uint8)
    config = Config(role="worker", token="0123456789", register_timeout_s=6.0)
    enrol = Enrol("a", "1", 1, "none", "none", ("w [3]",), (3,))
    learner = LearnerClient(config, f"tcp://127.0.0.1:{free_port()}", enrol, [ones], lambda *_: ones)
    with pytest.raises(JobFailed) as failed:
        learner.answer(0, wait=True)
    learner.close()
    assert (gave_up := re.search(r"gave up after (\d+) s", str(failed.value))) is not None
    assert int(gave_up[1]) < 10
