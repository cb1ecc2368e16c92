"""``psgc.saving()``: who is told of saves, and what waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

import psgc
from psgc.processes.checkpoints import SAVES, Saves


def test_it_is_also_psgc_torch_saving() -> None:
    import psgc.torch

    assert psgc.torch.saving is psgc.saving


def test_a_save_is_told_when_the_first_begins_and_when_the_last_has_ended() -> None:
    saves, told, other = Saves(), [], ExitStack()
    saves.report_to(told.append, 1.0)
    with saves.saving():
        with saves.saving():
            assert told == [True]
        thread = threading.Thread(target=lambda: other.enter_context(saves.saving()))
        thread.start()
        thread.join()
    assert (told, saves.under_way) == ([True], True), "the other thread's is still under way"
    other.close()
    assert (told, saves.under_way) == ([True, False], False)


def test_an_error_inside_passes_through_and_ends_the_save() -> None:
    with pytest.raises(OSError, match="disk is full"), psgc.saving():
        raise OSError("disk is full")
    assert not SAVES.under_way


def test_one_that_began_before_there_was_anybody_to_tell_is_told_then() -> None:
    saves, told = Saves(), []
    with saves.saving():
        saves.report_to(told.append, 1.0)
        assert told == [True]
    assert told == [True, False]


def test_a_function_can_be_a_save() -> None:
    @psgc.saving()
    def save() -> bool:
        return SAVES.under_way

    assert (save(), save(), SAVES.under_way) == (True, True, False)


def test_a_forked_child_neither_speaks_for_its_parent_nor_waits_for_its_threads() -> None:
    with SAVES.saving():
        child = os.fork()
        if child == 0:
            os._exit(int(SAVES.under_way))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert SAVES.under_way


# Time passes while the watchdog waits, and only then: what happens meanwhile is done by its thread.
WATCHED = """
import sys, threading, types
from psgc.processes import checkpoints
from psgc.processes.checkpoints import SAVES, Watchdog
grace_s, limit_s, save_s, more_s = map(float, sys.argv[1:])
now, over, saves = 0.0, threading.Event(), [SAVES.saving()]
saves[0].__enter__()
class Stopped:
    def wait(self, seconds):
        global now
        now += seconds
        if saves and now >= save_s:
            saves.pop().__exit__(None, None, None)
            print("whole", flush=True)
        if now >= save_s + more_s:
            over.set()
        return over.is_set()
checkpoints.time = types.SimpleNamespace(monotonic=lambda: now)
watchdog = Watchdog(SAVES, Stopped(), grace_s, limit_s, "the job failed")
watchdog.start()
over.wait()
print("ended by itself", flush=True)
"""


@pytest.mark.parametrize(
    ("times", "status", "out", "err"),
    [
        (("2", "60", "3", "0"), 0, "whole\nended by itself\n", ""),  # after a save it has its grace anew
        (("0.5", "60", "2", "60"), 1, "whole\n", "psgc: the job failed\n"),
        (("0.5", "1", "60", "0"), 1, "", "psgc: the checkpoint being written (inside psgc.saving()) is not whole: it was not done 1 s "
            "(PSGC_SAVE_TIMEOUT_S) after the job had failed\npsgc: the job failed\n"),
        (("30", "1", "0.1", "1.5"), 0, "whole\nended by itself\n", ""),  # a limit below the grace takes nothing from it
    ],
)  # fmt: skip
def test_a_process_that_does_not_end_is_ended_after_its_grace_or_its_save(times: tuple[str, ...], status: int, out: str, err: str) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED, *times], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


# Time passes while the end of the script waits, and only then.
AT_EXIT = """
import sys, threading, types
from psgc.processes import checkpoints
saves, (limit_s, name_after_s, save_s) = checkpoints.Saves(), map(float, sys.argv[1:])
saves.report_to(lambda _: None, limit_s)
now, begun, enough = 0.0, threading.Event(), threading.Event()
def save():
    with saves.saving():
        begun.set()
        enough.wait()
        print("whole", flush=True)
saver = threading.Thread(target=save, name="saver", daemon=True)
saver.start()
begun.wait()
def sleep(seconds):
    global now
    now += seconds
    if now >= save_s:
        enough.set()
        saver.join()
checkpoints.time = types.SimpleNamespace(monotonic=lambda: now, sleep=sleep)
with saves.saving():
    saves.await_others(name_after_s)  # which does not wait for its own thread
"""


@pytest.mark.parametrize(
    ("limits", "out", "said"),
    [
        (("60", "60", "1"), "whole\n", ""),
        (("60", "0.1", "3"), "whole\n", "psgc: the script has ended; waiting for thread 'saver', inside psgc.saving(), 60 s at most\n"),
        (("0.2", "60", "60"), "", "psgc: the checkpoint that 'saver' writes is not whole: it was not done 0 s (PSGC_SAVE_TIMEOUT_S) after the script had "
            "ended\n"),
    ],
)  # fmt: skip
def test_the_end_of_a_script_waits_for_what_its_other_threads_write(limits: tuple[str, ...], out: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT, *limits], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == (out, said)
