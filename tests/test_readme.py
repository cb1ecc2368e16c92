"""What README.md and docs/ tell people to type can be typed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from psgc import __version__, variables
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


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_sections_lead_to_headings() -> None:
    links = [(page, *link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())]
    assert len(links) > 5
    for page, target, anchor in links:
        assert anchor in anchors(page.parent / target if target else page), f"{page.name} links to {target}#{anchor}"


def spans(page: Path) -> list[str]:
    """The code spans of a page's sentences and tables."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


@functools.cache
def all_commands() -> Any:
    """Of typer's app: made once, for it takes a while."""
    return typer.main.get_command(app)


def misfit(words: list[str]) -> str:
    """What is wrong with the words after ``psgc``, up to the user's own command: a verb or a flag that does not exist."""
    words = words[: words.index("--")] if "--" in words else words
    command = all_commands()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no verb {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    flags = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    return ", ".join(f"no flag {word}" for word in words if word.startswith("--") and word.partition("=")[0] not in flags)


def test_psgc_commands_that_sentences_name_have_verbs_and_flags_that_exist() -> None:
    named = [(page.name, span) for page in PAGES for span in spans(page) if re.match(r"psgc [a-z]", span)]
    assert len(named) > 30
    for page, span in named:
        words = re.sub(r"\[|\]|\.\.\.|:.*", " ", span).split()[1:]  # also "[--option]", and lines that psgc prints: "psgc run: ..."
        assert not misfit(words), f"{page}: `{span}`: {misfit(words)}"
    assert misfit(["run", "--wokers", "2"]) == "no flag --wokers"
    assert misfit(["docter"]) == "no verb docter"


def test_modules_scripts_and_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for module in re.findall(r"python -m (psgc[\w.]*)", text):
            assert importlib.util.find_spec(module) is not None, f"{page.name} runs {module}"
        for script, flags in re.findall(r"python ((?:benchmarks|examples|tests)/[\w/]+\.py)([^`\n#]*)", text):
            source = (ROOT / script).read_text()
            for flag in re.findall(r"--[\w-]+", flags.partition(" -- ")[0]):
                assert f'"{flag}"' in source, f"{page.name}: {script} {flag}"
        for target in re.findall(r"^make ([a-z][\w-]*)|`make ([a-z][\w-]*)`", text, re.MULTILINE):
            assert "".join(target) in targets, f"{page.name}: make {''.join(target)}"


def named_in_tree(page: Path) -> Iterator[tuple[str, bool]]:
    """Each path that a page's tree of folders names, and whether it exists. A line's path is in the folder of the line above that is less indented."""
    above: list[tuple[int, Path]] = []
    for indent, names in re.findall(r"^( {4,})((?:[\w/]+(?:/|\.py),? ?)+)(?= |$)", page.read_text(), re.MULTILINE):
        above = [(depth, folder) for depth, folder in above if depth < len(indent)]
        inside = above[-1][1] if above else ROOT
        first, *others = names.replace(",", "").split()
        for path in (inside / first, *(((inside / first).parent) / other for other in others)):
            yield str(path.relative_to(ROOT)), path.exists()
        above.append((len(indent), inside / first))


def test_the_trees_in_readme_and_design_name_folders_and_files_that_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "design.md"):
        named = dict(named_in_tree(page))
        assert len(named) > 15
        assert not [path for path, exists in named.items() if not exists], page.name


def test_settings_that_pages_name_exist() -> None:
    known = {name for v in variables.VARIABLES for name in (v.name, *v.aliases)} | {
        *variables.WITHOUT_EFFECT,
        *variables.LAUNCHER_VARIABLES,
        *variables.OF_OTHERS,
    }
    misspelt = {"PSGC_PARTBYTES", "DMLC_PS_ROOT_URL"}  # examples of what psgc says about such names
    for page in PAGES:
        unknown = set(re.findall(r"\b(?:PSGC|DMLC|BYTEPS)_[A-Z\d_]+\b", page.read_text())) - known - misspelt
        assert not unknown, f"{page.name}: {unknown}"


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
    assert "codec int8" in done.stderr or "codec int4" in done.stderr, "over so slow a link the plan encodes, with what psgc advise takes"


@pytest.mark.parametrize("program", ["psgc.launch.cli", "psgc.launch.job.bpslaunch"])
def test_version_says_which_psgc_and_whose_python(program: str) -> None:
    code = f"import sys; sys.argv = ['x', '--version']; from {program} import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"psgc {__version__}, Python {sys.version.split()[0]} at {sys.executable}\n"
