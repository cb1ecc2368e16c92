"""Learners and a syncer as processes: one that dies, one that is slow and one that comes late stop nobody, and neither does a syncer that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.preloaded import Preloaded

JOB = Path(__file__).parent.parent / "jobs" / "learner.py"


class Process:
    """With what it has said so far."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.text = ""
        everything = {key: value for key, value in os.environ.items() if not key.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
        self.popen = Preloaded(command, {**everything, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def until(self, words: str) -> str:
        while not re.search(words, self.text):
            self._line(words)
        return self.text

    def until_answered(self, count: int) -> None:
        """Until so many more of its pushes have been answered than when it says next how many have."""
        enough = self._answers() + count
        while self._answers() < enough:
            pass

    def _answers(self) -> int:
        words = r"step \d+ \S+ (\d+) answers"
        while (said := re.search(words, self._line(words))) is None:
            pass
        return int(said[1])

    def _line(self, words: str) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"it ended before {words!r}: {self.text}"
        self.text += line
        return line

    def ended(self) -> int:
        out, _ = self.popen.communicate(timeout=280)
        self.text += out
        return self.popen.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Process] = []

    def begin(*command: Any, **env: str) -> Process:
        running.append(Process([str(word) for word in command], **env))
        return running[-1]

    yield begin
    for process in running:
        process.popen.kill()
        process.popen.communicate()


def syncer(start: Start, port: int, *more: Any, **env: str) -> Process:
    process = start("-m", "psgc.launch", "syncer", "--listen", f"127.0.0.1:{port}", *more, **env)
    process.until("learners connect to")
    return process


@pytest.mark.timeout(300)
def test_a_learner_that_dies_one_that_is_slow_and_one_that_comes_late_stop_nobody(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="PSGC_ENCRYPT=1 needs it")
    port, tokens = free_port(), tmp_path / "tokens"
    tokens.write_text("".join(f"{name} token-of-{name}\n" for name in ("fast", "slow", "dies", "late")))
    held = syncer(start, port, "--learners", tokens, "--rule", "delayed:learners=3", PSGC_ENCRYPT="1")

    def learner(name: str, steps: int, sleep_s: float, *more: str) -> Process:
        own = {"PSGC_SYNCER": f"127.0.0.1:{port}", "PSGC_LEARNER": name, "PSGC_TOKEN": f"token-of-{name}", "PSGC_ENCRYPT": "1"}
        return start(JOB, steps, sleep_s, *more, **own)

    # Whose pushes are counted waits for the syncer's answers: else the numbers are those of the machine's time.
    slow, dies = learner("slow", 100_000, 0.5), learner("dies", 100_000, 0.01, "delay=0")
    slow.until("step 5 ")
    slow.kill(signal.SIGSTOP)  # as slow as can be
    dies.until("step 20 ")
    dies.kill()
    fast = learner("fast", 200, 0.01, "delay=0")
    assert fast.ended() == 0, fast.text
    late = learner("late", 50, 0.01, "delay=0")
    assert late.ended() == 0, late.text
    assert slow.popen.poll() is None, "the slow one is still there, and nobody has waited for it"
    slow.kill()
    held.kill(signal.SIGTERM)
    assert held.ended() == 0, held.text
    pushes = {name: int(count) for name, count in re.findall(r"(\w+): (\d+) pushes", held.text.splitlines()[-1])}
    assert pushes.keys() == {"fast", "slow", "dies", "late"}
    assert min(pushes["fast"], pushes["dies"], pushes["late"]) >= 2, pushes
    first, last = (float(late.text.split(word)[1].split()[0]) for word in ("step 5 ", "ended "))
    assert first < 1.5 and last < 1.5, "it began with what the others had learned"
    assert "Traceback" not in held.text + fast.text + late.text


@pytest.mark.timeout(300)
def test_learners_train_on_while_the_syncer_is_dead_and_with_the_one_that_follows_it(start: Start, tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "outer.npz"
    held = syncer(start, port, "--save", file, "--save-every", "0.2")
    env = {"PSGC_SYNCER": f"127.0.0.1:{port}", "PSGC_SILENCE_S": "0.2"}
    enough = tmp_path / "enough"
    first, second = (start(JOB, 100_000, 0.02, f"until={enough}", PSGC_LEARNER=name, **env) for name in ("a", "b"))
    for each in (first, second):
        each.until("step 40 ")
    while not file.exists():
        time.sleep(0.01)
    held.kill()
    held.ended()
    for each in (first, second):
        each.until("trains on without the syncer at")
    again = syncer(start, port, "--save", file)
    assert "going on from" in again.text or again.until("going on from")
    for each in (first, second):
        each.until_answered(8)
    enough.touch()
    assert first.ended() == 0 and second.ended() == 0, first.text + second.text
    again.kill(signal.SIGTERM)
    assert again.ended() == 0
    pushes = dict(re.findall(r"(\w+): (\d+) pushes", again.text.splitlines()[-1]))
    assert pushes.keys() == {"a", "b"} and all(int(count) > 5 for count in pushes.values())
    assert "Traceback" not in first.text + second.text + again.text


@pytest.mark.timeout(300)
def test_learners_train_on_with_a_syncer_that_follows_one_which_has_saved_nothing(start: Start, tmp_path: Path) -> None:
    port = free_port()
    held = syncer(start, port)
    env = {"PSGC_SYNCER": f"127.0.0.1:{port}", "PSGC_SILENCE_S": "0.2"}
    enough = tmp_path / "enough"
    first, second = (start(JOB, 100_000, 0.02, f"until={enough}", PSGC_LEARNER=name, **env) for name in ("a", "b"))
    for each in (first, second):
        each.until("step 100 ")
    held.kill()
    held.ended()
    for each in (first, second):
        each.until("trains on without the syncer at")
    again = syncer(start, port)
    third = start(JOB, 50, 0.02, PSGC_LEARNER="c", **env)
    for each in (first, second):
        each.until_answered(4)
    enough.touch()
    for each in (first, second, third):
        assert each.ended() == 0, each.text
    again.kill(signal.SIGTERM)
    assert again.ended() == 0
    pushes = dict(re.findall(r"(\w+): (\d+) pushes", again.text.splitlines()[-1]))
    assert pushes.keys() == {"a", "b", "c"}
    assert all(int(count) > 1 for count in pushes.values())
    assert "Traceback" not in first.text + second.text + third.text + again.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "how"), [(signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")])
def test_a_syncer_saves_when_its_terminal_ends(start: Start, tmp_path: Path, number: signal.Signals, how: str) -> None:
    port, file = free_port(), tmp_path / "outer.npz"
    held = syncer(start, port, "--save", file, "--save-every", "100000")
    learner = start(JOB, 60, 0.01, PSGC_SYNCER=f"127.0.0.1:{port}", PSGC_LEARNER="a")
    assert learner.ended() == 0, learner.text
    while not file.exists():
        time.sleep(0.01)
    first = file.stat().st_mtime_ns  # with the initial values
    held.kill(number)
    assert held.ended() == 0 and f"ended by {how}: " in held.text, held.text
    assert file.stat().st_mtime_ns > first


@pytest.mark.timeout(300)
def test_a_second_learner_of_a_name_takes_the_place_of_the_first_for_good(start: Start) -> None:
    port = free_port()
    held = syncer(start, port)
    env = {"PSGC_SYNCER": f"127.0.0.1:{port}", "PSGC_LEARNER": "lyon"}
    first = start(JOB, 100_000, 3, **env)  # whose training thread looks seldom; its connection would be made again sooner
    first.until("begins")
    second = start(JOB, 60, 0.1, **env)
    assert second.ended() == 0, second.text
    assert first.ended() == 1, first.text
    assert (
        first.text.strip()
        .splitlines()[-1]
        .endswith("learner lyon: another process has enrolled as learner lyon: give each learner a name of its own")
    ), first.text
    held.kill(signal.SIGTERM)
    assert held.ended() == 0 and held.text.count("enrolled learner=lyon") == 2, held.text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rule", "nesterov"], "rounds and bounds make learners wait; choose delayed, or one with round=0"),
        (["--rule", "delaid"], "did you mean delayed?"),
        (["--listen", "nowhere"], "--listen nowhere: expected host:port, or a port"),
        (["--listen", "0.0.0.0:0"], "give --learners a file of tokens, or set PSGC_TOKEN"),
        (["--save-every", "0"], "expected seconds above 0"),
        (["--save", "/no/such/folder/outer.npz"], "syncer: --save /no/such/folder/outer.npz: No such file or directory: /no/such/folder"),
        (["--save", "/"], "syncer: --save /: Is a directory"),
        (["--save", f"{'x' * 254}"], "File name too long"),
    ],
)
def test_wrong_flags_are_told_in_a_line(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from psgc.launch import cli

    monkeypatch.delenv("PSGC_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["psgc", "syncer", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code in (1, 2) and text in told[-1] and len(told) == 1
