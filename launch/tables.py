"""Tables for people, on stdout."""

from __future__ import annotations


def print_table(header: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """As wide as the terminal lets it be."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
