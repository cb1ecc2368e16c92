"""Tables for people, on stdout, and what is being done, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psgc.compiling import Heard, told_by


def print_table(header: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """As wide as the terminal lets it be."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(header))
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal's stderr while it is done; nothing elsewhere. Kernels that are compiled meanwhile come between, and
    are told of wherever stderr leads; but nothing is told where it shall be quiet."""
    from rich.console import Console

    console, doing = Console(stderr=True), ""
    if quiet:
        with told_by(Heard(lambda text: None)):
            yield lambda text: None
        return
    if not console.is_terminal:
        yield lambda text: None
        return

    def tell(text: str) -> None:
        nonlocal doing
        doing = text
        status.update(text)

    with console.status("") as status, told_by(Heard(lambda text: status.update(text or doing))):
        yield tell
