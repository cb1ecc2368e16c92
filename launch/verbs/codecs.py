"""The verb ``psgc codecs``: what each codec saves and loses."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress

if TYPE_CHECKING:
    from psgc.launch.gpu_results import GpuResult


@compiles_on_call
def codecs(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as they stand in docs/codecs.md.")] = False,
) -> None:
    """List the codecs, their parameters, what they save, what they lose, and when to use which.

    One of another package that does not work is a line on stderr instead, and the status is 2.

    Example: psgc codecs
    """
    if as_json and markdown:
        raise UsageError("codecs: --json and --markdown exclude each other; give one of them")
    from psgc.codecs.catalogue import catalogue
    from psgc.launch.gpu_results import cited, gpu_results
    from psgc.launch.pages.codecs import render_codecs, terminal_tables

    with progress(as_json):
        broken: list[str] = []
        entries = catalogue(broken)
    results = gpu_results()
    if as_json:
        entries = [entry | _on_gpus(entry["canonical"], results) for entry in entries]
    if as_json:
        print(json.dumps(entries))
    elif markdown:
        print(render_codecs(entries))
    else:
        for header, rows in terminal_tables(entries):
            print_table(header, rows)
        for result in results:
            speeds = [[codec, *_speeds(result.of(codec))] for codec in result.codecs]
            print_table(["codec", "elements", "encode us", "decode us", "encode, of a copy"], speeds, title=f"on a GPU, {cited(result)}")
    for line in broken:
        print(f"psgc: {line}", file=sys.stderr)
    if broken:
        raise typer.Exit(2)


def _speeds(sizes: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """The rows of the largest size."""
    numel, ops = list(sizes.items())[-1]
    times = [f"{1e6 * ops[op]['seconds']:,.1f}" if op in ops else "" for op in ("encode", "decode")]
    return [f"{numel:,}", *times, f"{ops['encode']['of_copy']:.0%}" if "encode" in ops else ""]


def _on_gpus(codec: str, results: list[GpuResult]) -> dict[str, Any]:
    """What has been measured of the codec, by GPU."""
    from psgc.launch.gpu_results import cited

    found = {result.device: {"source": cited(result), "operations": rows} for result in results if (rows := result.of(codec))}
    return {"gpu": found} if found else {}
