"""What ``.ci/run`` says of tests that it had to run twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RERUN = Path(__file__).parents[1] / ".ci" / "rerun.py"
UNSTEADY = """
import pathlib

def test_steady(): pass

def test_unsteady():
    seen = pathlib.Path("seen")
    before = seen.exists()
    seen.touch()
    assert before

def test_broken(): assert pathlib.Path("mended").exists()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long")
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    return tmp_path


def test_its_last_lines_name_the_tests_that_were_run_again_and_how_they_ended(project: Path) -> None:
    assert run(project, "-m", "pytest", "-q").returncode == 1
    again = run(project, str(RERUN))
    assert again.returncode == 1
    assert again.stdout.splitlines()[-4:] == [
        "2 tests failed and were run again, once each:",
        "  test_it.py::test_broken: failed again",
        "  test_it.py::test_unsteady: passed the second time",
        "1 passed the second time, 1 failed twice",
    ]


def test_it_succeeds_if_all_of_them_pass_then(project: Path) -> None:
    run(project, "-m", "pytest", "-q")
    (project / "mended").touch()
    again = run(project, str(RERUN))
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == "2 passed the second time, 0 failed twice"


def test_a_command_that_failed_without_a_test_is_not_a_success(project: Path) -> None:
    again = run(project, str(RERUN))
    assert (again.returncode, again.stdout) == (1, "the tests' command failed, but no test did: nothing is run again\n")
