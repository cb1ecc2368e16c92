"""The verb ``psgc plan``: a profile and a cluster in; a plan, tables and a page out."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.files import check_place, write
from psgc.launch.flags import ClusterText, GpuText, Json, ProfileText, check_gpu
from psgc.launch.tables import progress

if TYPE_CHECKING:
    from psgc.plan.inputs.cluster import Cluster
    from psgc.plan.inputs.profile import Profile
    from psgc.plan.model.options import Constraints
    from psgc.plan.model.quality import Standard


@compiles_on_call
def plan(
    profile: ProfileText,
    cluster: ClusterText,
    codec: Annotated[
        str | None, typer.Option(help="What buckets are encoded with; default: what psgc advise takes on this cluster.")
    ] = None,
    gpu: GpuText = None,
    method: Annotated[str, typer.Option(help="psgc, or another system's: espresso, hipress, hitopkcomm, byteps-compress, fp32.")] = "psgc",
    constraints: Annotated[str | None, typer.Option(help="TOML or JSON file of what is ruled out; see docs/plans.md.")] = None,
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable",
            help="Only what jobs of this version run, at their costs.",
        ),
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Search for about so many seconds, or until the bound is near; default: some tenths of a second.")
    ] = None,
    quality: Annotated[
        str,
        typer.Option(
            help="exact: no codec; safe: what keeps training within noise from its first step; fast: all that suits the optimizer."
        ),
    ] = "safe",
    optimizer: Annotated[str, typer.Option(help="adam or sgd: 1-bit and top-k cost quality under Adam-like optimizers.")] = "adam",
    force: Annotated[
        bool, typer.Option("--force", help="Compress even if the verdict is not to, and plan buckets even if that is not verified.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page with the timeline and the reasons.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the plan.")] = None,
    as_json: Json = False,
) -> None:
    """Choose how tensors are fused and cut, and where each bucket is compressed, if at all; and say how good that is.

    Example: psgc plan --profile bert-base --cluster espresso-nvlink --codec onebit --report plan.html -o plan.json
    """
    check_place(report, "--report")
    check_place(out, "-o")
    check_gpu("plan", profile, gpu)
    if seconds is not None and not (0 < seconds < float("inf") and method == "psgc"):
        raise UsageError(f"plan: --seconds {seconds:g}: expected a number above 0, and --method psgc, which alone searches for longer")
    with progress(as_json) as tell:
        from psgc.launch.gpu_results import with_measured_codecs
        from psgc.plan.model.constraints import ALL, load_constraints
        from psgc.plan.model.job import load_job
        from psgc.plan.model.level import LEVELS
        from psgc.plan.model.quality import ADAM, OPTIMIZERS, Standard
        from psgc.plan.report.assessment import BEST, assess
        from psgc.plan.report.document import document

        allowed = load_constraints(constraints) if constraints else ALL
        allowed = replace(allowed, runtime=True) if runnable else allowed
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"plan: --optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        if force and method != BEST:
            raise UsageError(f"plan: --force and --method {method}: another method's plan is written as it is; leave one of them out")
        if quality not in LEVELS:
            raise UsageError(f"plan: --quality {quality!r}: choose one of {', '.join(LEVELS)}")
        standard = Standard(quality, optimizer == ADAM)
        choose = functools.partial(_advised, gpu or "", standard)
        job = load_job(profile, cluster, codec, allowed, gpu=gpu, standard=standard, measured=with_measured_codecs, choose=choose)
        _check_encodes(codec, job.problem.constraints, f"constraints {constraints}")
        tell(f"planning {job.problem.profile.model} by {method}")
        assessed = assess(job, method, compare=not as_json or report is not None, seconds=seconds, standard=standard, force=force)
        made = document(assessed)
        if report is not None:
            from psgc.plan.report.report import report as page

            write(report, page(assessed), "--report")
    if out is not None:
        from psgc.plan.model.plan import plan_text

        write(out, plan_text(made), "-o")
    if as_json:
        print(json.dumps(made))
    else:
        from psgc.launch.plan_tables import print_plan

        print_plan(assessed)


def _advised(gpu: str, standard: Standard, profile: Profile, cluster: Cluster) -> tuple[str, str]:
    """What ``psgc advise`` takes, and a note."""
    from psgc.launch.gpu_results import with_measured_codecs
    from psgc.plan.whatif.advise import advised_codec

    return advised_codec(profile, cluster, gpu=gpu, standard=standard, measured=with_measured_codecs)


def _check_encodes(codec: str | None, allowed: Constraints, source: str) -> None:
    """Raise UsageError if the constraints forbid every encoding, so that the codec could not be used."""
    from psgc.plan.model.job import may_encode
    from psgc.plan.model.plan import UNCOMPRESSED

    if codec in (None, UNCOMPRESSED) or may_encode(allowed):
        return
    to_run = (
        ' for a plan to run, which encodes on "cpu", and on "gpu" where gradients lie there' if allowed.runtime and allowed.devices else ""
    )
    raise UsageError(f"plan: --codec {codec}, but {source} rule out all encoding{to_run}; leave one of them out")
