"""The verb ``psgc options``: the options that the planner chooses from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from psgc.errors import UsageError
from psgc.launch.flags import Json


def options(
    gpu_only: Annotated[bool, typer.Option("--gpu-only", help="Encode and decode on GPUs only.")] = False,
    most_encodes: Annotated[int | None, typer.Option(help="Largest number of encodings in an option.")] = None,
    flat: Annotated[bool, typer.Option("--flat/--no-flat", help="Options without an intra-node stage.")] = True,
    servers: Annotated[bool, typer.Option("--servers", help="Include options over servers.")] = False,
    as_json: Json = False,
) -> None:
    """List the options of a bucket: which collectives and servers it travels through, and where it is encoded.

    Example: psgc options --gpu-only --most-encodes 1
    """
    from psgc.plan.model.options import DEVICES, Constraints, all_options, constrained, encodes, is_uncompressed, subtree_sizes

    if most_encodes is not None and most_encodes < 0:
        raise UsageError(f"options: --most-encodes {most_encodes}: expected at least 0")
    chosen = constrained(Constraints(DEVICES[:1] if gpu_only else DEVICES, most_encodes, flat, True, servers))
    if as_json:
        counts = {"count": len(chosen), "gpu_only": len(all_options(("gpu",))), "uncompressed": sum(map(is_uncompressed, chosen))}
        print(json.dumps({**counts, "subtrees": subtree_sizes(), "options": [list(option) for option in chosen]}))
        return
    for number in range(max(map(encodes, chosen), default=-1) + 1):
        print(f"{sum(encodes(option) == number for option in chosen)} options that encode {number} times")
    for option in chosen:
        print("  " + "  ".join(option))
