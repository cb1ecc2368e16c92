"""Joining, leaving, and what is said when a script dies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import psgc.torch as psgc
from psgc.errors import JobFailed, UsageError
from psgc.torch import api

CALLS: list[Any] = [psgc.rank, psgc.size, psgc.local_rank, psgc.local_size, psgc.barrier]


@pytest.mark.parametrize("call", CALLS)
def test_everything_before_init_says_to_call_init(call: Any) -> None:
    with pytest.raises(UsageError, match=r"not initialized in this process; call psgc.torch.init\(\) first"):
        call()


@pytest.mark.usefixtures("alone")
def test_a_process_alone_is_rank_0_of_1() -> None:
    psgc.barrier()
    assert (psgc.rank(), psgc.size(), psgc.local_rank(), psgc.local_size()) == (0, 1, 0, 1)


@pytest.mark.usefixtures("alone")
def test_init_and_shutdown_can_be_repeated() -> None:
    session = psgc.current_session()
    psgc.init()
    assert psgc.current_session() is session
    psgc.shutdown()
    psgc.shutdown()
    assert not psgc.is_initialized()
    psgc.init()
    assert psgc.is_initialized() and psgc.current_session() is not session


@pytest.mark.usefixtures("alone")
def test_init_sets_the_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.getswitchinterval() == pytest.approx(0.0005)


@pytest.mark.usefixtures("alone")
def test_a_forked_child_does_not_own_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    session = psgc.current_session()
    monkeypatch.setattr(api.os, "getpid", lambda: 1)
    assert not psgc.is_initialized()
    psgc.shutdown()
    monkeypatch.undo()
    assert psgc.current_session() is session


def script(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"import psgc.torch as psgc\npsgc.init()\n{text}"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_an_uncaught_psgc_error_is_one_line_and_status_1() -> None:
    done = script("psgc.synchronize(99)")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("psgc: push_pull handle 99 is unknown")
    assert len(done.stderr.splitlines()) == 1


def test_other_errors_keep_their_traceback() -> None:
    done = script("raise ValueError('lost')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1] == "ValueError: lost"


@pytest.mark.parametrize(("raised", "told"), [
    ("ValueError('lost\\n twice')", "rank 0 ended with ValueError: lost twice"),
    ("psgc_errors.UsageError('no')", "rank 0 ended with no"),
    ("psgc_errors.JobFailed('rank 1 is dead')", None),
])  # fmt: skip
def test_the_other_ranks_are_told_what_killed_this_one_unless_they_told_it(raised: str, told: str | None) -> None:
    done = script(
        "import psgc.errors as psgc_errors\n"
        "psgc.current_session().fail = lambda text: print('told:', text)\n"
        f"raise {raised}"
    )  # fmt: skip
    assert done.stdout == ("" if told is None else f"told: {told}\n")


def test_a_wrong_setting_is_one_line() -> None:
    done = script("", DMLC_NUM_WORKER="many")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("psgc: DMLC_NUM_WORKER='many' is wrong")


def test_a_setting_that_is_unknown_is_a_warning() -> None:
    done = script("", PSGC_CODEX="int8")
    assert done.returncode == 0 and "PSGC_CODEX is set but unknown" in done.stderr


def test_settings_are_logged_where_asked_without_the_token() -> None:
    done = script("", PSGC_LOG_LEVEL="info", PSGC_TOKEN="secret")
    assert "part_bytes=4194304" in done.stderr and "secret" not in done.stderr


@pytest.mark.usefixtures("alone")
def test_a_failed_session_raises_at_the_next_call() -> None:
    psgc.current_session().fail("rank 0 ended with lost")
    with pytest.raises(JobFailed, match="lost"):
        psgc.barrier()
