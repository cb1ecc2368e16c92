"""The verb ``psgc trace merge``: the timelines of a job's members as one trace, and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.files import check_place
from psgc.launch.flags import GpuText, Json
from psgc.launch.observing.traces import ClusterFile, Folder, PlanFile, ProfileFile, tell_traces


@compiles_on_call
def merge(
    folder: Folder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The merged trace; default: merged.json in the folder.")] = None,
    plan: PlanFile = None,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    gpu: GpuText = None,
    as_json: Json = False,
) -> None:
    """Merge the timelines of a job's ranks and servers into one, on one clock, for ui.perfetto.dev; print what they come to.

    Example: psgc trace merge trace -o merged.json --plan plan.json --profile profile.json
    """
    output = output or folder / "merged.json"
    check_place(output if folder.is_dir() else None, "--output")
    tell_traces("trace merge", folder, output, plan, profile, cluster, gpu, as_json)
