"""The verb ``psgc codecs``: what each codec saves and loses."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress


@compiles_on_call
def codecs(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as they stand in docs/codecs.md.")] = False,
) -> None:
    """List the codecs, their parameters, what they save, what they lose, and when to use which.

    Example: psgc codecs
    """
    if as_json and markdown:
        raise UsageError("codecs: --json and --markdown exclude each other; give one of them")
    from psgc.codecs.catalogue import catalogue
    from psgc.launch.pages.codecs import render_codecs, terminal_tables

    with progress(as_json):
        entries = catalogue()
    if as_json:
        print(json.dumps(entries))
    elif markdown:
        print(render_codecs(entries))
    else:
        for header, rows in terminal_tables(entries):
            print_table(header, rows)
