"""The verb ``psgc warm``: kernels compiled ahead of their first use."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from psgc.launch.flags import Json


def warm(
    codec: Annotated[list[str] | None, typer.Option(help="Codec; give it several times for several. Default: everything.")] = None,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of their first use, for this machine's processor and its GPUs.

    Example: psgc warm --codec int8
    """
    from psgc.launch.job.warming import BROADCAST_CODEC, everything, gpus
    from psgc.launch.job.warming import warm as warm_kernels

    devices, lacking = gpus()
    done = warm_kernels([BROADCAST_CODEC, *codec] if codec else everything(), quiet=as_json, devices=devices)
    if as_json:
        print(json.dumps(done))
    else:
        compiled = sum(one["compiled"] for one in done)
        seconds = sum(one["seconds"] for one in done)
        for_gpus = sum(one["for_gpus"] for one in done)
        print(
            f"{compiled} kernels compiled in {seconds:.0f} s" + (f", {for_gpus} of them for GPUs" if for_gpus else "")
            if compiled
            else f"all kernels of {len(done)} codec{'s' * (len(done) > 1)} were compiled before"
        )
        if lacking:
            print(f"no kernels were compiled for GPUs: {lacking}")
