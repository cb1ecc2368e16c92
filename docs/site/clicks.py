"""Twelve questions of a newcomer, and how many clicks from the site's first page it takes to read each answer: ``python docs/site/clicks.py build/site``.

Only links in the text count. The navigation, which every page has, would make every page one click away, and would not tell where to look.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOST = 3  # clicks
FIRST = "index.html"


class Question(NamedTuple):
    """asked; the page that answers; words that stand there: the answer itself."""

    asked: str
    page: str
    words: tuple[str, ...]


QUESTIONS = (
    Question("What is it, and is it for my network?", "paying.html", ("psgc advise",)),
    Question("What does it run on: Python, torch, systems?", "versions.html", ("3.10", "torch", "Linux")),
    Question("How do I install it?", "files/index.html", ("pip install .", "psgc doctor")),
    Question("What do I change in my training script?", "integrations.html", ("ddp_hook",)),
    Question("How do I start a job on this machine?", "launching.html", ("psgc run",)),
    Question("How do I start it on several machines?", "clusters.html", ("--hostfile", "torchrun")),
    Question("Which codec do I take?", "codecs.html", ("int8", "onebit")),
    Question("What does compression cost in accuracy?", "quality.html", ("loss",)),
    Question("How do I see what the job is doing?", "observation.html", ("psgc top",)),
    Question("It failed, or waits: what does this message mean?", "troubleshooting.html", ("PSGC_STEP_TIMEOUT_S",)),
    Question("Who can read or alter what my job sends?", "files/SECURITY.html", ("PSGC_TOKEN", "PSGC_ENCRYPT")),
    Question("How do I go back to plain DDP?", "operations.html", ("Back to plain DDP",)),
)


class Article(HTMLParser):
    """The links and the text of a page's article."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text: list[str] = []
        self._inside = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside += tag == "article"
        target = dict(attrs).get("href")
        if tag == "a" and self._inside and target and "://" not in target and not target.startswith(("#", "mailto:")):
            self.links.append(target)

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "article"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text.append(data)


def read(site: Path, page: str) -> tuple[set[str], str]:
    """The pages that an article links to, and its text."""
    article = Article()
    article.feed((site / page).read_text())
    linked = set()
    for link in article.links:
        parts: list[str] = []
        for part in (PurePosixPath(page).parent / link.partition("#")[0]).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        linked.add("/".join(parts))
    return {each for each in linked if each.endswith(".html") and (site / each).is_file()}, "".join(article.text)


def clicks(site: Path) -> dict[str, int]:
    """The fewest clicks from the first page to each page that can be reached."""
    found, waiting = {FIRST: 0}, [FIRST]
    while waiting:
        page = waiting.pop(0)
        for linked in sorted(read(site, page)[0]):
            if linked not in found:
                found[linked] = found[page] + 1
                waiting.append(linked)
    return found


def faults(site: Path, found: Mapping[str, int]) -> list[str]:
    """What is wrong with the questions' answers, a line each."""
    wrong = []
    for question in QUESTIONS:
        count = found.get(question.page)
        if count is None or count > MOST:
            wrong.append(f"{question.asked} {question.page} takes {'no way' if count is None else count} clicks, at most {MOST}")
            continue
        text = read(site, question.page)[1]
        wrong += [f"{question.asked} {question.page} does not say {word!r}" for word in question.words if word not in text]
    return wrong


def main(site: Path) -> int:
    found = clicks(site)
    for question in QUESTIONS:
        print(f"{found.get(question.page, '-')}  {question.asked}  {question.page}")  # noqa: T201
    wrong = faults(site, found)
    for line in wrong:
        print(f"clicks: {line}", file=sys.stderr)  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
