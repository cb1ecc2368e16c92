"""The verb ``psgc bench pushpull``: the speed of push_pull between processes of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from psgc.errors import UsageError
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress
from psgc.transport.registry import choices


def pushpull(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes; 0: workers aggregate among themselves.")] = 1,
    nbytes: Annotated[int, typer.Option("--bytes", help="Bytes of fp32.")] = 25_000_000,
    codec: Annotated[str, typer.Option(help="Codec.")] = "none",
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(choices())}.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds timed.")] = 20,
    as_json: Json = False,
) -> None:
    """Time push_pull between real processes on this machine, gloo's all-reduce beside it; the sums are checked first.

    Example: psgc bench pushpull --workers 2 --servers 1 --bytes 25000000 --transport tcp
    """
    from psgc.codecs import parse_scheme
    from psgc.launch.bench.pushpull import bench_pushpull

    codec = parse_scheme(codec).canonical
    if transport not in choices():
        raise UsageError(f"bench pushpull: --transport {transport}: expected one of {', '.join(choices())}")
    if min(workers, rounds) < 1 or servers < 0:
        raise UsageError(
            f"bench pushpull: --workers {workers} --servers {servers} --rounds {rounds}: at least 1 worker and round, and 0 servers or more"
        )
    with progress(as_json) as tell:
        tell(f"{rounds} rounds of {nbytes} bytes, {workers} workers, {servers} servers")
        result = bench_pushpull(workers, servers, nbytes, codec, transport, rounds)
    if as_json:
        print(json.dumps(result))
    else:
        print_table(["", ""], [[key, f"{value:.2f}" if isinstance(value, float) else str(value)] for key, value in result.items()])
