"""Prints tables for people on stdout, and the current activity on stderr."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from psgc.diagnostics.compiling import TextObserver, observed_by


def print_table(header: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """Print a table as wide as the terminal allows. Cells are wrapped between words; a word is broken only if no other column can be narrower."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = [[name, *(row[number] for row in rows)] for number, name in enumerate(header)]
    narrow = _most_words(columns) + 3 * len(columns) + 1 > console.width  # a space and a line beside each cell
    edge = 3 * len(columns) + (-3 if narrow else 1)
    table = Table(
        title=title, title_justify="left", show_header=any(header), box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
        show_edge=not narrow, pad_edge=not narrow,
    )  # fmt: skip
    for name, width in zip(header, _widths(columns, console.width - edge), strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_text(text: str, mark: str = "") -> None:
    """Print a paragraph behind the mark; on a terminal, broken between words and indented by the mark's width. Elsewhere it is one line, for tools that
    read lines."""
    from rich.console import Console

    console = Console()
    print(paragraph(text, mark, console.width) if console.is_terminal else f"{mark}{text}")


def paragraph(text: str, mark: str, width: int) -> str:
    """The text in lines of at most so many characters, if no word is longer."""
    return textwrap.fill(
        text, width, initial_indent=mark, subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False
    )


def _longest_word(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _most_words(columns: Sequence[Sequence[str]]) -> int:
    return sum(map(_longest_word, columns))


def _widths(columns: Sequence[Sequence[str]], available: int) -> list[int]:
    """Each column's width: that of its longest cell. If the columns together are too wide, the widest shrinks
    first, down to its longest word and, if that is not enough, below it."""
    widths = [max((len(line) for cell in cells for line in cell.split("\n")), default=0) for cells in columns]
    for least in (list(map(_longest_word, columns)), [1] * len(columns)):
        while sum(widths) > available and any(width > one for width, one in zip(widths, least, strict=True)):
            widest = max((number for number in range(len(widths)) if widths[number] > least[number]), key=widths.__getitem__)
            widths[widest] -= 1
    return widths


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current activity on stderr while it lasts, if stderr is a terminal. Compilation of kernels is announced in any case.
    quiet: show and announce nothing."""
    from rich.console import Console

    console, doing = Console(stderr=True), ""
    if quiet:
        with observed_by(TextObserver(lambda text: None)):
            yield lambda text: None
        return
    if not console.is_terminal:
        yield lambda text: None
        return

    def tell(text: str) -> None:
        nonlocal doing
        doing = text
        status.update(text)

    with console.status("") as status, observed_by(TextObserver(lambda text: status.update(text or doing))):
        yield tell
