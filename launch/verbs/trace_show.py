"""The verb ``psgc trace show``: what the timelines of a job's members come to."""

from __future__ import annotations

from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.flags import GpuText, Json
from psgc.launch.observing.traces import ClusterFile, Folder, PlanFile, ProfileFile, tell_traces


@compiles_on_call
def show(
    folder: Folder,
    plan: PlanFile = None,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    gpu: GpuText = None,
    as_json: Json = False,
) -> None:
    """Sum up the timelines of a job: step time, each lane's work, what backward hides, the slowest rank.

    Example: psgc trace show trace
    """
    tell_traces("trace show", folder, None, plan, profile, cluster, gpu, as_json)
