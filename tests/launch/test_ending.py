"""When children that do not end by themselves are ended."""

from __future__ import annotations

import signal

from psgc.config import Config
from psgc.launch.supervision.ending import Ending, Patience

PATIENCE = Patience(fault_s=10.0, save_s=30.0, term_s=2.0)


def test_sigterm_comes_after_the_grace_and_sigkill_soon_after() -> None:
    ending = Ending(PATIENCE)
    assert ending.next(1e9) is None, "nobody has been told to end"
    ending.within(5.0, 100.0)
    assert ending.next(104.9) is None
    assert ending.next(105.0) == signal.SIGTERM
    assert ending.next(106.9) is None
    assert ending.next(107.0) == signal.SIGKILL
    assert ending.next(1e9) is None


def test_an_earlier_deadline_counts_and_a_later_one_does_not() -> None:
    ending = Ending(PATIENCE)
    ending.within(5.0, 100.0)
    ending.within(50.0, 100.0)
    ending.within(1.0, 101.0)
    assert ending.next(102.0) == signal.SIGTERM
    ending.within(0.0, 102.0)
    assert ending.next(103.9) is None, "SIGKILL has its time after SIGTERM"
    assert ending.next(104.0) == signal.SIGKILL


def test_ctrl_c_waits_for_those_whom_their_own_watchdog_ends() -> None:
    patience = Patience.of(Config())
    assert patience.after(signal.SIGINT) > Config().abort_grace_s
    assert patience.after(signal.SIGTERM) == patience.grace_s < 10, "a container's runtime kills after 10 s"
    assert Patience(grace_s=3600.0).after(signal.SIGINT) == 3600.0, "under Slurm"


def test_what_is_withdrawn_may_be_due_again() -> None:
    ending = Ending(PATIENCE)
    ending.within(5.0, 100.0)
    assert ending.hold(105.0) == 25.0
    ending.withdraw()
    assert ending.next(1e9) is None
    ending.within(5.0, 200.0)
    assert ending.next(204.9) is None
    assert ending.hold(205.0) == 25.0, "a checkpoint has its whole time again, and that is said again"
    assert ending.next(215.0) == signal.SIGTERM


def test_a_checkpoint_is_waited_for_up_to_its_limit_which_is_said_once() -> None:
    ending = Ending(PATIENCE)
    assert ending.hold(99.0) is None
    ending.within(5.0, 100.0)
    assert ending.hold(100.0) is None, "nothing is held back yet"
    assert ending.next(105.0) is None
    assert ending.hold(105.0) == 25.0
    assert ending.hold(106.0) is None
    for now in range(106, 130):
        ending.hold(float(now))
        assert ending.next(float(now)) is None
    assert ending.hold(130.0) is None
    assert ending.next(130.0) == signal.SIGTERM
    assert ending.next(132.0) == signal.SIGKILL
