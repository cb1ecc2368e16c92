"""What is awaited is named soon, then ever more rarely, and by one of the processes whose lines end up in one place."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from psgc.config import Config
from psgc.processes.reminder import Reminder
from psgc.transport.control.voice import AWAITED, PARTS, Voice, own_outlet
from psgc.transport.security import curve


@pytest.mark.parametrize(
    ("first_s", "said"), [(5.0, [5, 15, 35, 75, 135, 195]), (1.0, [1, 3, 7, 15, 31, 63, 123, 183]), (100.0, [100, 200])]
)
def test_each_period_is_twice_the_last_up_to_a_minute(first_s: float, said: list[int]) -> None:
    reminder = Reminder(0.0)
    assert [now for now in range(240) if reminder.due(float(now), first_s)] == said


def test_one_of_the_processes_of_an_outlet_speaks_until_it_ends() -> None:
    group = f"test {os.getpid()}"
    first, second = Voice(group, "terminal"), Voice(group, "terminal")
    elsewhere, stranger = Voice(group, "file"), Voice("another job", "terminal")
    assert [voice.speaks(AWAITED) for voice in (first, second, first, elsewhere, stranger)] == [True, False, True, True, True]
    assert second.speaks(PARTS), "a topic of its own"
    assert [second.speaks(AWAITED) for _ in range(3)] == [False] * 3
    first.close()
    assert second.speaks(AWAITED)
    for voice in (second, elsewhere, stranger):
        voice.close()


def test_where_lines_end_up_is_the_launchers_to_say_and_else_this_process_knows() -> None:
    assert own_outlet()
    first, second = Voice(f"test {os.getpid()}"), Voice(f"test {os.getpid()}")
    assert [first.speaks(PARTS), second.speaks(PARTS)] == [True, False]
    first.close()
    second.close()


def test_the_names_that_are_taken_tell_neither_the_token_nor_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the host reads them: a token is tried against them no faster than against a handshake."""
    config = Config(role="worker", root_host="127.0.0.1", root_port=9, token="secret", outlet="terminal")
    names = {Voice.of(config)._name_of(topic) for topic in (AWAITED, PARTS)}
    assert len(names) == 2
    assert len({Voice.of(replace(config, token=token))._name_of(AWAITED) for token in ("secret", "other", "")}) == 3
    keys = curve.control_keys(0, "secret")
    monkeypatch.setattr(curve, "control_keys", lambda job, token: keys)
    for token in ("secret", "other"):
        assert Voice.of(replace(config, token=token))._name_of(AWAITED) in names, "of the token it knows the keys alone"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_users_process_silences_nobody() -> None:
    """It may see a name, and take it when the process that held it has ended."""
    for listens in ("listens", ""):
        voice = Voice(f"test {os.getpid()}", "terminal")
        code = """if 1:
            import os, socket, sys
            os.setuid(65534)
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            held.bind("\\0psgc-voice/" + sys.argv[1])
            if sys.argv[2]:
                held.listen()
            print("held", flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-c", code, voice._name_of(PARTS), listens]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
            assert squatter.stdout is not None
            assert squatter.stdout.readline() == "held\n"
            assert voice.speaks(PARTS)
            squatter.communicate()
        voice.close()
