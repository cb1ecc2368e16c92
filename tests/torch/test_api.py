"""Joining, leaving, and what is said when a script dies."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import psgc.torch as psgc
from psgc.errors import JobFailed, UsageError
from psgc.torch.session.horovod import INSTEAD
from tests.preloaded import run_preloaded

BYTEPS_PAGE = Path(__file__).parents[2] / "docs" / "byteps.md"
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
    session = psgc.session.api.current_session()
    psgc.init()
    assert psgc.session.api.current_session() is session
    psgc.shutdown()
    psgc.shutdown()
    assert not psgc.is_initialized()
    psgc.init()
    assert psgc.is_initialized() and psgc.session.api.current_session() is not session


@pytest.mark.usefixtures("alone")
def test_init_sets_the_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.getswitchinterval() == pytest.approx(0.0005)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_own_the_session() -> None:
    session = psgc.session.api.current_session()
    child = os.fork()
    if not child:
        initialized = psgc.is_initialized()
        psgc.shutdown()
        os._exit(int(initialized))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert psgc.is_initialized()
    assert psgc.session.api.current_session() is session


# A process that has imported torch, which takes seconds, forks a child for each script: what the child does not catch ends it as it
# would end any script.
FORKER = """
import gc, json, os, sys
import psgc.torch as psgc
gc.freeze()  # else each child looks at all of torch as it ends, which takes most of its time
for line in sys.stdin:
    text, env, out, err = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    psgc.init()
    exec(compile(text, "train.py", "exec"))
    break
"""
Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """Runs a script that has imported psgc and called init, with no environment but the one given."""
    folder, numbers = tmp_path_factory.mktemp("scripts"), itertools.count()
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKER]  # newer Pythons warn of forks beside other threads
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        assert forker.stdin is not None and forker.stdout is not None

        def run(text: str, **env: str) -> subprocess.CompletedProcess[str]:
            out, err = (folder / f"{next(numbers)}" for _ in range(2))
            print(json.dumps([text, env, str(out), str(err)]), file=forker.stdin, flush=True)
            status = forker.stdout.readline()
            return subprocess.CompletedProcess(text, int(status), out.read_text(), err.read_text())

        yield run
        forker.stdin.close()
        assert forker.wait(250) == 0


def test_an_uncaught_psgc_error_shows_the_users_own_lines_and_status_1(script: Script) -> None:
    done = script("import json\ndef main():\n  json.loads('1', object_hook=None, parse_int=lambda _: psgc.synchronize(99))\nmain()")
    assert done.returncode == 1
    *trace, last = done.stderr.splitlines()
    assert last.startswith("UsageError: push_pull handle 99 is unknown")
    assert trace == ["Traceback (most recent call last):", *(f'  File "train.py", line {n}, in {of}' for n, of in (
        (4, "<module>"), (3, "main"), (3, "<lambda>")))]  # fmt: skip


def test_a_training_script_loads_none_of_the_planners_kernels(script: Script) -> None:
    """On a new machine ``import psgc.torch`` would compile them."""
    done = script(
        "import sys\nprint([name for name, module in sys.modules.items() if name.startswith('psgc.plan') and hasattr(module, 'kernel')])"
    )
    assert done.stdout == "[]\n"


def test_a_call_before_init_is_told_as_one_after_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import psgc.torch as psgc\nprint(psgc.rank())")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
    done = run_preloaded(str(tmp_path / "train.py"), env=env)
    trace = ["Traceback (most recent call last):", f'  File "{tmp_path}/train.py", line 2, in <module>', "    print(psgc.rank())"]
    *frames, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, "UsageError: psgc is not initialized in this process; call psgc.torch.init() first")
    assert [line for line in frames if set(line.strip()) - set("^~")] == trace


def test_a_hook_that_the_script_sets_between_import_and_init_hears_of_its_errors_once(script: Script) -> None:
    done = script("import sys\nbefore = sys.excepthook\nsys.excepthook = lambda *error: (print('heard'), before(*error))\n"
                  "psgc.session.api.ending.install(lambda: None)\n"
                  "raise ValueError('lost')")  # fmt: skip
    assert (done.stdout, done.stderr.splitlines()[-1], done.stderr.count("Traceback")) == ("heard\n", "ValueError: lost", 1)


def test_a_job_that_failed_elsewhere_is_one_line_and_none_where_the_launcher_prints_it(script: Script) -> None:
    failed = "from psgc.errors import JobFailed\nerror = JobFailed('rank 1 ended with ValueError')\n"
    done = script(failed + "raise error")
    assert (done.returncode, done.stderr) == (1, "psgc: rank 1 ended with ValueError\n")
    done = script(failed + "error.told = True\nraise error")
    assert (done.returncode, done.stderr) == (1, "")


def test_other_errors_keep_their_traceback(script: Script) -> None:
    done = script("raise ValueError('lost')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1] == "ValueError: lost"


@pytest.mark.parametrize(("raised", "told"), [
    ("ValueError('lost\\n twice')", "rank 0 ended with ValueError: lost twice (train.py:3)"),
    ("KeyboardInterrupt", "rank 0 ended with KeyboardInterrupt (train.py:3)"),
    ("psgc_errors.UsageError('no')", "rank 0 ended with UsageError: no (train.py:3)"),
    ("psgc_errors.JobFailed('rank 1 is dead')", None),
    ("RuntimeError('my trainer') from psgc_errors.JobFailed('rank 1 is dead')", None),
])  # fmt: skip
def test_the_other_ranks_are_told_what_killed_this_one_unless_they_told_it(script: Script, raised: str, told: str | None) -> None:
    done = script(
        "import psgc.errors as psgc_errors\n"
        "psgc.session.api.current_session().fail = lambda text: print('told:', text)\n"
        f"raise {raised}"
    )  # fmt: skip
    assert done.stdout == ("" if told is None else f"told: {told}\n")


def test_a_wrong_setting_is_one_line(script: Script) -> None:
    done = script("", DMLC_NUM_WORKER="many")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("psgc: DMLC_NUM_WORKER='many' is wrong")


def test_a_worker_of_several_without_an_address_does_not_start(script: Script) -> None:
    done = script("", DMLC_NUM_WORKER="2")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("psgc: DMLC_NUM_WORKER=2 is set, but DMLC_PS_ROOT_URI, the address of the job's scheduler, is missing: ")


def test_a_codec_in_a_job_of_one_is_told_to_have_no_effect(script: Script) -> None:
    done = script("psgc.DistributedOptimizer", PSGC_CODEC="int8")
    assert done.returncode == 0
    assert done.stderr.count("PSGC_CODEC=int8 has no effect: this is a job of one worker, and nothing is sent") == 1
    assert len(done.stderr.splitlines()) == 1
    assert script("", PSGC_CODEC="none").stderr == ""


def test_a_setting_that_is_unknown_is_a_warning(script: Script) -> None:
    done = script("", PSGC_CODEX="int8")
    assert done.returncode == 0 and "PSGC_CODEX is set but unknown; did you mean PSGC_CODEC?" in done.stderr


def test_settings_are_logged_where_asked_without_the_token(script: Script) -> None:
    done = script("", PSGC_LOG_LEVEL="info", PSGC_TOKEN="secret")
    assert "part_bytes=4194304" in done.stderr and "secret" not in done.stderr


@pytest.mark.usefixtures("alone")
def test_a_failed_session_raises_at_the_next_call() -> None:
    psgc.session.api.current_session().fail("rank 0 ended with lost")
    with pytest.raises(JobFailed, match="lost"):
        psgc.barrier()


def test_horovods_names_say_what_does_the_same_and_the_page_has_each() -> None:
    page = BYTEPS_PAGE.read_text().split("## From Horovod\n")[1].split("\n## ")[0]
    for name, instead in INSTEAD.items():
        assert not hasattr(psgc, name)
        with pytest.raises(AttributeError, match=f"^psgc.torch has no '{name}', a name of Horovod's: {re.escape(instead)} "):
            getattr(psgc, name)
        assert f"`{name}`" in page, name
        if instead.startswith("use ") and "average=" not in instead.split()[1]:
            assert hasattr(psgc, re.match(r"use (\w+)", instead)[1])  # type: ignore[index]
    with pytest.raises(AttributeError, match=r"^psgc.torch has no 'push_pul'$"):
        psgc.push_pul  # type: ignore[attr-defined]  # noqa: B018
