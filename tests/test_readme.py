"""What README.md and docs/ tell people to type can be typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from psgc import __version__
from psgc.launch.cli import app
from psgc.launch.usage import WRONG_USAGE

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text()


def shell_lines(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def verbs_of(page: Path) -> list[list[str]]:
    """The words after ``psgc`` of the commands that a page shows."""
    commands = []
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if "psgc" in words and words[0] not in ("docker", "pip"):
            commands.append(words[words.index("psgc") + 1 :])
    return commands


def parse(words: list[str]) -> None:
    """As the command line does, without running it."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("psgc", list(words), resilient_parsing=False)
    while hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        assert rest[0] in command.commands, f"no such verb {rest[0]}"
        command = command.commands[rest[0]]
        context = command.make_context(rest[0], rest[1:], parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_psgc_command_that_a_page_shows_has_verbs_and_flags_that_exist(page: Path) -> None:
    for words in verbs_of(page):
        try:
            parse(words)
        except WRONG_USAGE as error:
            pytest.fail(f"psgc {' '.join(words)}: {error.format_message()}")


def test_a_command_with_a_flag_that_does_not_exist_would_be_seen() -> None:
    assert len(verbs_of(ROOT / "README.md")) >= 6
    with pytest.raises(WRONG_USAGE):
        parse(["run", "--wokers", "2", "--", "python", "train.py"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "cuda" / "README.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """In backticks, from the root, or from psgc or psgc/torch."""
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml))`", page.read_text()):
        found = [folder for folder in (ROOT, ROOT / "psgc", ROOT / "psgc" / "torch") if (folder / name).exists()]
        assert found or "NAME" in name, f"{page.name} names {name}"


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a line as a shell in a folder with README's train.py does, ``psgc`` and ``python`` being this interpreter's."""
    (script,) = re.findall(r"^```python\n(# train\.py\n.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "psgc").write_text(f'#!/bin/sh\nexec {sys.executable} -m psgc.launch "$@"\n')
    (bin_folder / "psgc").chmod(0o755)
    path = os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, shell=True, cwd=tmp_path, env={**clean, "PATH": path}, capture_output=True, text=True, check=False)

    return run


@pytest.mark.timeout(240)
def test_the_script_that_readme_shows_trains_as_readme_starts_it(shell: Any) -> None:
    line = next(line for line in shell_lines(ROOT / "README.md") if line.startswith("psgc run --workers 2"))
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[worker 0\] loss [01]\.\d{3}$", done.stdout, re.MULTILINE), done.stdout
    assert "optimizer0: 4 tensors (407,050 elements) in 1 bucket, codec none; " in done.stderr
    assert "100 steps, " in done.stderr
    assert "but psgc is installed for" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_way_from_profile_to_run_that_readme_shows_can_be_gone(shell: Any) -> None:
    lines = shell_lines(ROOT / "README.md")
    first = next(index for index, line in enumerate(lines) if line.startswith("psgc profile"))
    for line in lines[first : first + 3]:
        done = shell(line)
        assert done.returncode == 0, done.stderr
    assert "codec int8" in done.stderr, "over so slow a link the plan encodes"


@pytest.mark.parametrize("program", ["psgc.launch.cli", "psgc.launch.job.bpslaunch"])
def test_version_says_which_psgc_and_whose_python(program: str) -> None:
    code = f"import sys; sys.argv = ['x', '--version']; from {program} import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"psgc {__version__}, Python {sys.version.split()[0]} at {sys.executable}\n"
