"""A job that fails does not end a process in the middle of a checkpoint: neither the process itself nor its launcher, up to a limit."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import signal
import sys
from pathlib import Path
from typing import Any

SAVES = Path(__file__).parent.parent / "jobs" / "saves.py"
TELLING = "import os, sys, time; from psgc.diagnostics.report import Launcher; tell = Launcher(os.environ['PSGC_LAUNCHER']).tell; "
SAVING = (
    TELLING + "tell('joined', rank=0); tell('saving'); print('up', flush=True); time.sleep({}); tell('saved'); print('whole', flush=True); "
)
KILLED = r"psgc run: (worker 1 \(pid \d+\)|rank 1) was killed by SIGKILL( \(pid \d+\))?"  # as its launcher or the scheduler has seen it
FAILING = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)\nraise SystemExit(3)"


def whole() -> bytes:
    spec = importlib.util.spec_from_file_location("saves", SAVES)
    assert spec is not None and spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    return b"".join(job.chunk(number) for number in range(job.CHUNKS))


def until_waited_for(popen: Any) -> str:
    """The line by which a launcher says that it waits for a checkpoint, longer than its patience is."""
    for line in popen.stderr:
        if "waited for" in line:
            return str(line)
    raise AssertionError("it ended without waiting")


def saving_job(launched: Any, folder: Path, *limit: str, grace_s: int) -> Any:
    """Rank 1 is killed while rank 0 writes `folder / "checkpoint"`, until there is `folder / "enough"`."""
    words = (str(SAVES), str(folder / "checkpoint"), "--until", str(folder / "enough"), *limit)
    popen = launched.psgc("run", "--no-prefix", "--", sys.executable, *words, PSGC_ABORT_GRACE_S=str(grace_s))
    said: list[str] = []
    while not {"writing", "rank"} <= {line.split()[0] for line in said}:
        said.append(popen.stdout.readline())
        assert said[-1], popen.communicate()[1]
    (victim,) = [int(line.split()[-1]) for line in said if line.startswith("rank 1 is ")]
    os.kill(victim, signal.SIGKILL)
    return popen


def test_a_checkpoint_that_takes_longer_than_all_patience_is_whole_though_another_rank_was_killed(launched: Any, tmp_path: Path) -> None:
    popen = saving_job(launched, tmp_path, grace_s=15)  # its launcher's patience ends after 18 s
    said = until_waited_for(popen)
    (tmp_path / "enough").touch()
    status, out, err = launched.end(popen)
    assert (status, out) == (128 + signal.SIGKILL, "written, and the job had failed meanwhile\n"), err
    assert (tmp_path / "checkpoint").read_bytes() == whole()
    assert re.search(r"psgc run: worker 0: a checkpoint is being written \(psgc\.saving\(\)\) and waited for, \d+ s at most", said), said
    assert re.fullmatch(r"psgc run: rank 1 was killed by SIGKILL \(pid \d+\)", err.splitlines()[-1]), err


def test_a_checkpoint_that_takes_longer_than_its_limit_is_said_to_be_in_pieces(launched: Any, tmp_path: Path) -> None:
    popen = saving_job(launched, tmp_path, "--limit", "2", grace_s=1)  # its launcher waits for longer: it has the time to say so
    status, out, err = launched.end(popen)
    assert (status, out) == (128 + signal.SIGKILL, ""), err
    assert re.search(
        r"^psgc: the checkpoint being written \(inside psgc\.saving\(\)\) is not whole: it was not done \d+ s", err, re.MULTILINE
    ), err
    assert re.fullmatch(KILLED, err.splitlines()[-1]), err


def saving_until_another_fails(ready: Path, enough: Path) -> tuple[str, str]:
    """The code of one that saves until a file is there, and of one that fails when the first has begun."""
    waiting = f"[time.sleep(0.05) for _ in iter(lambda: os.path.exists({str(enough)!r}), True)]; (0"
    return SAVING.format(f"0); open({str(ready)!r}, 'w').close(); {waiting}"), FAILING.format(str(ready))


def test_a_launcher_waits_for_a_checkpoint_and_then_as_long_as_ever(launched: Any, tmp_path: Path) -> None:
    saving, failing = saving_until_another_fails(tmp_path / "ready", tmp_path / "enough")
    tidy = "time.sleep(1); print('tidied')"
    popen = launched.supervised(("a", saving + tidy, False), ("b", failing, False), grace_s=20)
    until_waited_for(popen)
    (tmp_path / "enough").touch()
    status, out, err = launched.end(popen)
    assert (status, out) == (3, "[a] up\n[a] whole\n[a] tidied\n"), err


def test_a_launcher_ends_one_that_is_at_its_checkpoint_for_too_long(launched: Any, tmp_path: Path) -> None:
    saving, failing = saving_until_another_fails(tmp_path / "ready", tmp_path / "never")
    popen = launched.supervised(("a", saving, False), ("b", failing, False), prefix=False, grace_s=0.5, save_s=2)
    status, out, err = launched.end(popen)
    assert (status, out) == (3, "up\n"), err


def test_a_checkpoint_is_waited_for_after_a_first_ctrl_c_and_a_second_ends_it(launched: Any) -> None:
    saving = "import signal; signal.signal(signal.SIGINT, lambda *_: print('not yet', flush=True)); "
    saving += SAVING.format("1); [time.sleep(1) for _ in range(1000)]; (0")
    popen = launched.supervised(("a", saving, False), prefix=False, grace_s=0.5)
    launched.read_until(popen, "up")
    popen.send_signal(signal.SIGINT)
    launched.read_until(popen, "not yet")
    until_waited_for(popen)
    popen.send_signal(signal.SIGINT)
    assert launched.end(popen)[:2] == (130, "")


def test_one_that_dies_at_its_checkpoint_is_not_waited_for(launched: Any) -> None:
    dying = SAVING.format("0.5); os._exit(4); (0")
    stays = "import time; time.sleep(1000)"
    status, _, err = launched.end(launched.supervised(("a", dying, False), ("b", stays, False), grace_s=0.5, save_s=1e6))
    assert (status, "waited for" in err) == (4, False), err


def test_a_checkpoint_that_is_written_because_the_terminal_is_lost_is_waited_for_and_may_print(launched: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    code = TELLING + "import signal\ndef save(*_):\n tell('saving')\n for i in range(15): print(i, flush=True); time.sleep(0.1)\n"
    code += f" open({str(whole)!r}, 'w').close(); tell('saved'); sys.exit()\n"
    code += "signal.signal(signal.SIGTERM, save); tell('joined', rank=0)\nwhile True: print('line', flush=True); time.sleep(0.01)"
    terminal, end = pty.openpty()
    lost = f"[os.dup2(os.open({os.ttyname(end)!r}, os.O_WRONLY | os.O_NOCTTY), fd) for fd in (1, 2)]"
    popen = launched.supervised_with(lost, ("a", code, False))
    seen = b""
    while b"line" not in seen:
        seen += os.read(terminal, 1 << 16)
    os.close(end)
    os.close(terminal)
    status, _, _ = launched.end(popen)
    assert (status, whole.exists()) == (1, True)
