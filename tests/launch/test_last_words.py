"""The reason of a process's end, read from its output: the error, and the user's line of the traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psgc.launch.supervision.last_words import LastWords


def words(text: str) -> LastWords:
    heard = LastWords()
    heard.hear(text.encode().splitlines())
    return heard


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (train.py:1)"),
        ("def f():\n  1 / 0\n\nf()", "ZeroDivisionError: division by zero (train.py:2)"),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
         "(train.py:2)"),
        ("x = (", "SyntaxError: '(' was never closed (train.py:1)"),
        ("try:\n  1 / 0\nexcept Exception as e:\n  raise KeyError('batch') from e", "KeyError: 'batch' (train.py:4)"),
        ("raise ValueError('first\\n  second')", "ValueError: first (train.py:1)"),
        ("def f(n): return f(n + 1)\n\nf(0)", "RecursionError: maximum recursion depth exceeded (train.py:1)"),
    ],
)  # fmt: skip
def test_pythons_own_tracebacks_are_read(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert words(done.stderr).error == said, done.stderr


def test_a_script_elsewhere_is_named_with_its_folder() -> None:
    text = 'Traceback (most recent call last):\n  File "/elsewhere/train.py", line 3, in <module>\n    f()\nValueError: bad\n'
    assert words(text).error == "ValueError: bad (/elsewhere/train.py:3)"


def test_lines_of_libraries_are_passed_over_unless_there_are_no_others() -> None:
    library = f'  File "{os.__file__}", line 9, in g\n    h()\n'
    installed = '  File "/x/site-packages/torch/nn.py", line 8, in h\n    raise\n'
    own = '  File "/a/train.py", line 3, in f\n    g()\n'
    head, error = "Traceback (most recent call last):\n", "ValueError: bad\n"
    assert words(head + own + library + installed + error).error == "ValueError: bad (/a/train.py:3)"
    assert words(head + library + installed + error).error == "ValueError: bad (/x/site-packages/torch/nn.py:8)"


def test_what_psgc_tells_of_a_run_is_not_why_it_ended() -> None:
    for log in (
        "2026-01-02 03:04:05,678 INFO psgc.run: 5 steps, 3.1 ms each",
        "WARNING:psgc.torch.session.without_effect:PSGC_CODEC has no effect",
    ):
        assert words(f"no such data set\n{log}\n").line == "no such data set"
        assert words(f"{log}\n").line == ""
    assert words("INFO train: see psgc.log\n").line == "INFO train: see psgc.log"


def test_an_error_of_psgcs_has_one_name_and_one_place() -> None:
    frame = 'Traceback (most recent call last):\n  File "/a/train.py", line 3, in f\n    psgc.init()\n'
    for name in ("UsageError", "psgc.errors.UsageError"):
        assert words(f"{frame}{name}: init() after shutdown()\n").error == "UsageError: init() after shutdown() (/a/train.py:3)"


def test_colours_are_left_out() -> None:
    frame = '  File \x1b[35m"/a/train.py"\x1b[0m, line \x1b[35m3\x1b[0m, in f\n'
    text = f"Traceback (most recent call last):\n{frame}\x1b[1;35mValueError\x1b[0m: \x1b[35mbad\x1b[0m\n"
    assert words(text).error == "ValueError: bad (/a/train.py:3)"


def test_a_traceback_that_was_logged_long_before_the_end_is_not_why_it_ended() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/train.py", line 3, in f\nValueError: bad\n'
    assert words(text + "working\n" * 5).error
    assert words(text + "working\n" * 30).error == ""
    assert words(text + "working\n" * 30).line == "working"
