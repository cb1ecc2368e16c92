"""The documentation site: every page is in it, and no link of it leads nowhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from psgc.launch.pages import commands, python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text()
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_place_in_the_sites_navigation(page: str) -> None:
    assert re.search(rf": {re.escape(page)}$", SETTINGS, re.MULTILINE), f"mkdocs.yml has no row for docs/{page}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_name_and_a_sentence(page: str) -> None:
    heading, blank, first = (DOCS / page).read_text().split("\n")[:3]
    assert heading.startswith("# ") and not blank
    assert re.match(r"(?!```)[\w`*\[]", first), f"docs/{page}: expected a first paragraph that says what the page answers, got {first!r}"


def test_the_reference_of_commands_has_every_verb_and_flag() -> None:
    page = commands.page()
    assert page.count("\n## psgc ") > 15
    for text in (
        "## psgc bench pushpull",
        "| `--link-mbit` |",
        "| `--nodes` | required |",
        "```sh\npsgc run --workers 4 --codec onebit -- python train.py\n```",
    ):
        assert text in page, text


def test_the_reference_of_names_has_every_public_one_with_its_docstring() -> None:
    page = python.page()
    for module in python.MODULES:
        for name in python.public(module):
            if callable(getattr(importlib.import_module(module), name)):
                assert f"\n### {name}\n" in page
    assert "0x" not in page, "no addresses, which differ from run to run"


def test_public_names_and_their_signatures_are_those_that_were_promised() -> None:
    """Changing one is a break: docs/upgrading.md says how a name goes. New names and new optional arguments are added by
    ``python -m psgc.launch.pages.python --signatures > tests/golden/api.txt``."""
    promised = (ROOT / "tests" / "golden" / "api.txt").read_text().splitlines()
    command = [sys.executable, "-m", "psgc.launch.pages.python", "--signatures"]
    # In a process of its own: torch adds ``step`` to the classes of optimizers that have been made.
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == promised


@pytest.mark.timeout(600)
def test_the_site_builds_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for page in (
        "index",
        "plans",
        "reference/commands",
        "reference/python",
        "results/espresso",
        "files/CONTRIBUTING.md",
        "files/psgc/wire/PROTOCOL.md",
    ):
        assert (tmp_path / "site" / f"{page.removesuffix('.md')}.html").is_file(), page
    plans = (tmp_path / "site" / "plans.html").read_text()
    assert 'href="predicted-and-measured.html' in plans
    assert not re.search(r'(?:src|href)="https?://(?!ui\.perfetto|jobset|squidfunk)[^"]*\.(?:js|css|woff2?)"', plans), (
        "nothing is loaded from elsewhere"
    )
