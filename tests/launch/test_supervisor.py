"""Supervised processes live and die together: first cause first, nobody left behind, however they or the launcher end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.supervision import guard
from psgc.launch.supervision.child import script

SLEEP = "import time; time.sleep(1000)"
STUBBORN = "from signal import *; import time; signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); print('up', flush=True); time.sleep(1000)"
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print("up", flush=True)
"""


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


def guardian_of(launched: Any, old: int = 0) -> int:
    """The launcher's guardian, once it is another than ``old``."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in launched.left() - {old}:
            with contextlib.suppress(OSError):
                if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        time.sleep(0.01)
    raise AssertionError("no guardian")


def test_all_well_is_status_0_and_silence(launched: Any) -> None:
    status, out, err = launched.end(launched.supervised(("a", "print(1)", False), ("b", "print(2)", False)))
    assert (status, sorted(out.splitlines()), err) == (0, ["[a] 1", "[b] 2"], "")


def test_one_that_fails_ends_the_others_and_the_last_line_says_who_and_how(launched: Any) -> None:
    status, _, err = launched.end(launched.supervised(("a", SLEEP, False), ("b", "raise SystemExit(3)", False), grace_s=0.5))
    assert status == 3
    assert re.fullmatch(r"launcher: b ended with status 3\n", err), "said once, and nothing after it"


def test_the_last_word_of_the_one_that_failed_is_part_of_the_reason(launched: Any) -> None:
    code = "import sys; print('loading', file=sys.stderr); raise RuntimeError('out of \\x1b[31mmemory\\x1b[0m')"
    status, _, err = launched.end(launched.supervised(("a", SLEEP, False), ("b", code, False), grace_s=0.5))
    assert status == 1
    assert re.fullmatch(r"launcher: b ended with RuntimeError: out of memory", last(err)), err


def test_the_first_cause_stays_the_reason_when_others_fail_after_it(launched: Any, tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    follower = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('told to end')); open({ready!r}, 'w'); time.sleep(1000)"
    first = f"import os, signal, time\nwhile not os.path.exists({ready!r}): time.sleep(0.05)\nos.kill(os.getpid(), signal.SIGSEGV)"
    status, _, err = launched.end(launched.supervised(("follower", follower, False), ("first", first, False), grace_s=1, term_s=100))
    assert status == 128 + signal.SIGSEGV
    assert "[follower] told to end" in err
    assert re.fullmatch(r"launcher: first was killed by SIGSEGV \(pid \d+\)", last(err)), err


TELLING = "import os, sys, time; from psgc.diagnostics.report import Launcher; tell = Launcher(os.environ['PSGC_LAUNCHER']).tell; "


def test_consequences_that_end_first_are_not_taken_for_the_cause(launched: Any, tmp_path: Path) -> None:
    """The first fails before the follower tells of that, and ends after the follower is no more."""
    died, gone = str(tmp_path / "died"), str(tmp_path / "pid")
    first = TELLING + f"tell('joined', rank=0); tell('died', 'ValueError: bad (train.py:17)', 0); open({died!r}, 'w').close()\n"
    first += f"while not (os.path.exists({gone!r}) and (pid := open({gone!r}).read())): time.sleep(0.05)\n"
    first += "while os.path.exists('/proc/' + pid): time.sleep(0.05)\nsys.exit(5)"
    follower = TELLING + f"tell('joined', rank=1)\nwhile not os.path.exists({died!r}): time.sleep(0.05)\n"
    follower += f"tell('job failed', 'rank 0 ended with ValueError'); open({gone!r}, 'w').write(str(os.getpid())); sys.exit(1)"
    status, _, err = launched.end(launched.supervised(("first", first, False), ("follower", follower, False)))
    assert (status, err) == (5, "launcher: rank 0 ended with ValueError: bad (train.py:17)\n")


def test_where_nobody_has_joined_the_others_are_not_waited_for(launched: Any, tmp_path: Path) -> None:
    waits = str(tmp_path / "waits")
    waiting = TELLING + f"tell('joining'); open({waits!r}, 'w').close(); time.sleep(1000)"
    failing = f"import os, time\nwhile not os.path.exists({waits!r}): time.sleep(0.05)\n1 / 0"
    popen = launched.supervised(("b", waiting, False), ("a", failing, False), prefix=False, grace_s=1e6)
    status, _, err = launched.end(popen)  # with the grace it would hang
    assert status == 1
    assert re.fullmatch(r"launcher: a ended with ZeroDivisionError: division by zero", last(err)), err


def test_the_last_line_is_a_line_of_its_own_and_what_has_no_end_comes_before_it(launched: Any) -> None:
    code = "import sys; print('o', end=''); sys.stderr.write('e'); sys.exit(4)"
    for prefix, said in ((False, "e\n"), (True, "[a] e\n")):
        status, out, err = launched.end(launched.supervised(("a", code, False), prefix=prefix))
        assert (status, out) == (4, "[a] o\n" if prefix else "o")
        assert re.fullmatch(re.escape(said) + r"launcher: a ended with status 4: e\n", err), err


def test_reports_from_elsewhere_are_no_errors(launched: Any) -> None:
    nonsense = (
        "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); name = os.environ['PSGC_LAUNCHER'].rpartition(':')[0]\n"
    )
    nonsense += "for data in (b'', b'[]', b'{', b'\\xff', b'{\"child\": 0}', b'x' * 70000): s.sendto(data, chr(0) + name)"
    assert launched.end(launched.supervised(("a", nonsense, False))) == (0, "", "")


def test_services_may_end_by_themselves_once_the_others_have(launched: Any) -> None:
    service = "import time; time.sleep(1); print('saved')"
    status, out, err = launched.end(launched.supervised(("service", service, True), ("worker", "pass", False)))
    assert (status, out, err) == (0, "[service] saved\n", "")


def test_a_service_that_stays_is_ended_and_named(launched: Any) -> None:
    status, _, err = launched.end(launched.supervised(("service", SLEEP, True), ("worker", "pass", False), grace_s=1))
    assert status == 0
    assert "ending service" in last(err)


def test_a_service_that_fails_while_others_work_fails_the_job(launched: Any) -> None:
    status, _, err = launched.end(launched.supervised(("service", "raise SystemExit(1)", True), ("worker", SLEEP, False), grace_s=0.5))
    assert status == 1
    assert "service ended with status 1" in last(err)


def test_a_service_that_fails_when_all_is_done_is_said_but_fails_nothing(launched: Any, tmp_path: Path) -> None:
    """The launcher has waited for the worker when its process is no more."""
    told, done = str(tmp_path / "told"), str(tmp_path / "pid")
    worker = f"import os; open({told!r}, 'w').write(str(os.getpid())); os.rename({told!r}, {done!r})"
    service = f"import os, time\nwhile not os.path.exists({done!r}): time.sleep(0.05)\n"
    service += f"while os.path.exists('/proc/' + open({done!r}).read()): time.sleep(0.05)\nraise SystemExit(4)"
    status, _, err = launched.end(launched.supervised(("service", service, True), ("worker", worker, False)))
    assert status == 0
    assert re.fullmatch(r"launcher: after the workers had ended, service ended with status 4", err.strip()), err


def test_one_that_ignores_sigterm_is_killed(launched: Any) -> None:
    popen = launched.supervised(("a", STUBBORN, False), prefix=False, grace_s=0.5)
    launched.read_until(popen, "up")
    popen.send_signal(signal.SIGTERM)
    status, _, err = launched.end(popen)
    assert (status, last(err)) == (128 + signal.SIGTERM, "launcher: ended by SIGTERM")


def test_ctrl_c_reaches_python_as_keyboard_interrupt_and_its_tidying_is_waited_for(launched: Any) -> None:
    code = "import time\ntry: print('up', flush=True); time.sleep(1000)\nexcept KeyboardInterrupt:\n time.sleep(1); print('saved')"
    popen = launched.supervised(("a", code, False), prefix=False)
    launched.read_until(popen, "up")
    popen.send_signal(signal.SIGINT)
    status, out, err = launched.end(popen)
    assert (status, out, last(err)) == (130, "saved\n", "launcher: ended by SIGINT")


INTERRUPTED = """
import os, sys
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
with Supervisor("launcher", False, Patience(fault_s=100, grace_s=0.5, term_s=0.2)) as supervisor:
    supervisor.start("a", [sys.executable, "-c", {code!r}], os.environ)
    status = supervisor.run()
sys.exit(status)
"""


def test_after_ctrl_c_who_hangs_has_the_time_to_be_ended_by_its_own_watchdog(launched: Any) -> None:
    code = "import time\ntry: print('up', flush=True); time.sleep(1000)\nexcept KeyboardInterrupt:\n time.sleep(2); print('where it was')"
    popen = launched.python("-c", INTERRUPTED.format(code=code))
    launched.read_until(popen, "up")
    popen.send_signal(signal.SIGINT)
    assert launched.end(popen)[:2] == (130, "where it was\n")


def test_a_second_ctrl_c_kills_at_once(launched: Any) -> None:
    code = STUBBORN.replace("signal(SIGINT, SIG_IGN)", "signal(SIGINT, lambda *_: print('not yet', flush=True))").replace(
        "time.sleep(1000)", "[time.sleep(1) for _ in range(1000)]"
    )
    popen = launched.supervised(("a", code, False), prefix=False)
    launched.read_until(popen, "up")
    popen.send_signal(signal.SIGINT)
    launched.read_until(popen, "not yet")
    popen.send_signal(signal.SIGINT)
    assert launched.end(popen)[0] == 130


SHRINKS = """
import os, sys
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
with Supervisor("launcher", False, Patience(service_s={grace_s}, term_s=0.2)) as supervisor:
    supervisor.start({name!r}, [sys.executable, "-c", {first!r}], os.environ, service={name!r} == "scheduler")
    supervisor.start("second", [sys.executable, "-c", {second!r}], os.environ, replaced=True, spared=lambda: True)
    status = supervisor.run()
sys.exit(status)
"""


@pytest.mark.parametrize(("told", "grace_s"), [("before", 0.5), ("after", 20)])
def test_who_is_back_at_the_end_of_a_training_is_waited_for(launched: Any, tmp_path: Path, told: str, grace_s: float) -> None:
    """It has the state, and evaluates or saves: it takes no step any more. told: that it is back, before the launcher has seen the other's end, or after."""
    back, done = str(tmp_path / "back"), str(tmp_path / "done")
    first = f"import os, time\nwhile not os.path.exists({back!r}): time.sleep(0.05)\n"
    first += f"open({done + '~'!r}, 'w').write(str(os.getpid())); os.rename({done + '~'!r}, {done!r})"
    second = (
        TELLING + "import signal; tell('joined', rank=1)\nif os.environ['PSGC_INCARNATION'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    wait = (
        f"while not os.path.exists({done!r}): time.sleep(0.05)\nwhile os.path.exists('/proc/' + open({done!r}).read()): time.sleep(0.05)\n"
    )
    steps = ["tell('back')\n", f"open({back!r}, 'w').close()\n", wait]
    if told == "after":
        steps.append(steps.pop(0))
    second += "".join(steps) + f"time.sleep({grace_s} + 1); print('saved')"
    status, out, err = launched.end(launched.python("-c", SHRINKS.format(name="first", grace_s=grace_s, first=first, second=second)))
    assert (status, out) == (0, "saved\n"), err
    assert "ending second" not in err, err


def test_who_was_coming_back_when_the_job_failed_is_not_the_reason(launched: Any, tmp_path: Path) -> None:
    """It is told so before its first step, and ends when the launcher has heard from the scheduler why the job has failed."""
    late, failed = str(tmp_path / "late"), str(tmp_path / "failed")
    scheduler = TELLING + f"tell('joining')\nwhile not os.path.exists({late!r}): time.sleep(0.05)\n"
    scheduler += f"tell('job failed', 'nobody is left who has the state'); open({failed!r}, 'w').close(); sys.exit(1)"
    second = (
        TELLING + "import signal; tell('joined', rank=1)\nif os.environ['PSGC_INCARNATION'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    second += f"tell('job failed', 'worker 1 has come too late'); open({late!r}, 'w').close()\n"
    second += f"while not os.path.exists({failed!r}): time.sleep(0.05)\nsys.exit(1)"
    status, _, err = launched.end(launched.python("-c", SHRINKS.format(name="scheduler", grace_s=100, first=scheduler, second=second)))
    assert status == 1, err
    assert last(err) == "launcher: nobody is left who has the state", err


def test_children_of_children_end_with_the_job(launched: Any) -> None:
    status, out, _ = launched.end(launched.supervised(("a", PARENT, False), prefix=False))
    assert (status, out) == (0, "up\n")
    assert launched.left() == set()


def test_children_of_children_do_not_outlive_a_killed_launcher(launched: Any) -> None:
    popen = launched.supervised(("a", PARENT + SLEEP, False), prefix=False)
    launched.read_until(popen, "up")
    deadline = time.monotonic() + 100
    while len(launched.left()) < 4 and time.monotonic() < deadline:  # the launcher, its guardian, the child and the child's child
        time.sleep(0.01)
    assert len(launched.left()) == 4
    popen.kill()
    launched.end(popen)  # the fixture checks that nothing is left


def test_a_launcher_whose_output_nobody_reads_ends_its_job(launched: Any) -> None:
    code = "import itertools, time\nfor i in itertools.count(): print(i, flush=True); time.sleep(0.01)"
    popen = launched.supervised(("a", code, False))
    popen.stdout.readline()
    popen.stdout.close()
    assert popen.wait(timeout=300) == 1
    assert "nobody reads the output" in popen.stderr.read()
    popen.stderr.close()


def test_a_full_disk_under_the_output_is_said_and_the_job_goes_on(launched: Any) -> None:
    code = "import sys\nfor i in range(100): print(i, flush=True)\nprint('done', file=sys.stderr)"
    full = launched.supervised_with("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", ("a", code, False))
    status, _, err = launched.end(full)
    assert status == 0, err
    assert sorted(err.splitlines()) == [
        "[a] done", "launcher: stdout cannot be written (No space left on device): output is lost meanwhile, and the job goes on",
    ]  # fmt: skip


def test_much_output_on_both_streams_arrives_whole(launched: Any) -> None:
    code = "import sys\nfor i in range(20000): print(i); print(-i, file=sys.stderr)"
    status, out, err = launched.end(launched.supervised(("a", code, False), ("b", code, False)))
    assert status == 0
    for name in "ab":
        assert [int(line[4:]) for line in out.splitlines() if line.startswith(f"[{name}]")] == list(range(20000))
        assert [-int(line[4:]) for line in err.splitlines() if line.startswith(f"[{name}]")] == list(range(20000))


def test_a_command_that_is_no_program_says_so(launched: Any, tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"\x00\x01 no program")
    (tmp_path / "train").chmod(0o755)
    popen = launched.python(*script("tether.py")[1:], str(os.getpid()), "", str(tmp_path / "train"))
    status, _, err = launched.end(popen)
    assert status == 126
    assert "Exec format error" in err


def test_a_tethered_command_does_not_start_when_its_launcher_is_gone(launched: Any) -> None:
    status, out, _ = launched.end(launched.python(*script("tether.py")[1:], "1", "", sys.executable, "-c", "print('up')"))
    assert (status, out) == (1, "")


def test_what_python_ignores_is_not_ignored_by_the_command(launched: Any) -> None:
    tether = ["tether.py", str(os.getpid()), "", "grep", "SigIgn", "/proc/self/status"]
    status, out, _ = launched.end(launched.python(*script(tether[0])[1:], *tether[1:]))
    assert status == 0
    assert int(out.split()[1], 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_guardian_cannot_be_told_to_go_before_the_launcher(launched: Any, number: signal.Signals) -> None:
    popen = launched.supervised(("a", PARENT + SLEEP, False), prefix=False)
    launched.read_until(popen, "up")
    os.kill(guardian_of(launched), number)
    popen.kill()
    launched.end(popen)  # the fixture checks that nothing is left


def test_a_guardian_that_has_only_begun_cannot_be_told_to_go_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocks what it will ignore, from before its first instruction on."""
    monkeypatch.setattr(guard, "script", lambda _: [sys.executable, "-c", "input()"])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ward = guard.Guard()
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, "the launcher's own stays as it was"
        assert ward._popen is not None
        for number in guard.IGNORED:
            os.kill(ward._popen.pid, number)
        assert ward.renewed() == ""
        assert ward._popen.poll() is None
    finally:
        ward.close()


def test_a_guardian_that_is_killed_is_replaced_and_one_line_says_so(launched: Any) -> None:
    popen = launched.supervised(("a", PARENT + SLEEP, False), prefix=False)
    launched.read_until(popen, "up")
    first = guardian_of(launched)
    os.kill(first, signal.SIGKILL)
    second = guardian_of(launched, old=first)
    assert (
        popen.stderr.readline() == f"launcher: the job's guardian (pid {first}), which ends its processes if this one is killed, has ended "
        "itself; another was started\n"
    )
    assert second != first
    popen.kill()
    launched.end(popen)  # the fixture checks that nothing is left: the second knew of the children


def test_guardians_that_are_killed_again_and_again_are_not_replaced_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "script", lambda _: [sys.executable, "-c", ""])
    ward, said = guard.Guard(), []
    while not said or said[-1].endswith("another was started"):
        said += filter(None, [ward.renewed()])
    assert len(said) == guard.MOST and said[-1].endswith("end the job's processes yourself")
    assert ward.renewed() == ""
    ward.add(1 << 22)  # told to nobody
    ward.close()
