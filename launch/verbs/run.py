"""The verb ``psgc run``: a whole job on this machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs.", show_default=False)] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes; 0: workers aggregate among themselves.")] = 1,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of simulated nodes that the workers are spread over. Default: 1; with --link-mbit one for each worker."),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of DistributedOptimizer, e.g. int8 or onebit/int8.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="File of the plan that gradients travel by, or auto: by what is measured to be quickest."),
    ] = None,
    layout_out: Annotated[str | None, typer.Option(help="Write the layout that was used to this file, as a plan.")] = None,
    link_mbit: Annotated[
        float | None,
        typer.Option(
            help="Give each node and each server a simulated link of this rate, in 1e6 bit/s, each way: psgc's payloads are paced and go by TCP. "
            "Not paced: torch.distributed's collectives, and psgc's control messages."
        ),
    ] = None,
    as_byteps: Annotated[bool, typer.Option("--as-byteps", help="CMD's `import byteps.torch` is psgc.")] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Prefix each line with its process.")] = True,
) -> None:
    """Run a whole job on this machine: scheduler, servers, and CMD once a worker.

    Example: psgc run --workers 4 --codec onebit -- python train.py
    """
    from psgc.launch.job.restarts import restarts_of, run_again
    from psgc.launch.job.run import run_job

    def once(more: dict[str, str]) -> int:
        return run_job(
            command or [], workers=workers, servers=servers, nodes=nodes, codec=codec, plan=plan, layout_out=layout_out, link_mbit=link_mbit,
            prefix=prefix, as_byteps=as_byteps, more=more,
        )  # fmt: skip

    sys.exit(run_again(once, restarts_of(os.environ), "psgc run"))
