"""The verbs ``psgc plan`` and ``psgc simulate``: files in, tables, JSON, traces and pages out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.tables import print_table, progress

if TYPE_CHECKING:
    from psgc.plan.model.options import Constraints

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
ProfileText = Annotated[str, typer.Option("--profile", help="Profile: JSON, CSV with name, numel and ready_us, or a model's name.")]
ClusterText = Annotated[str, typer.Option("--cluster", help="Cluster: TOML, or the name of a ready-made one.")]

GpuText = Annotated[
    str | None, typer.Option("--gpu", help="The GPU of a model's name: v100, t4, a10g, a100, h100, h200, or what it achieves in TFLOP/s.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(compiles_on_call(plan))
    app.command()(compiles_on_call(simulate))


def plan(
    profile: ProfileText,
    cluster: ClusterText,
    codec: Annotated[
        str | None, typer.Option(help="What buckets are encoded with; default: the mildest that the profile has times for.")
    ] = None,
    gpu: GpuText = None,
    method: Annotated[str, typer.Option(help="psgc, or another system's: espresso, hipress, hitopkcomm, byteps-compress, fp32.")] = "psgc",
    constraints: Annotated[str | None, typer.Option(help="TOML or JSON file of what is ruled out; see docs/plans.md.")] = None,
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only what psgc run --plan carries: pushes to servers, encoding on CPUs.")
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
    _check_gpu("plan", profile, gpu)
    with progress(as_json) as tell:
        from psgc.plan.model.constraints import ALL, load_constraints
        from psgc.plan.model.job import load_job
        from psgc.plan.report.assessment import assess, document

        allowed = load_constraints(constraints) if constraints else ALL
        allowed = replace(allowed, runtime=True) if runnable else allowed
        _check_encodes(codec, allowed, f"constraints {constraints}")
        job = load_job(profile, cluster, codec, allowed, gpu=gpu)
        tell(f"planning {job.problem.profile.model} by {method}")
        assessed = assess(job, method, compare=not as_json or report is not None)
        text = json.dumps(document(assessed))
        if report is not None:
            from psgc.plan.report.report import report as page

            write(report, page(assessed), "--report")
    if out is not None:
        write(out, text + "\n", "-o")
    if as_json:
        print(text)
    else:
        from psgc.launch.plan_tables import print_plan

        print_plan(assessed)


def simulate(
    profile: ProfileText,
    cluster: ClusterText,
    plan: Annotated[str, typer.Option(help="The plan, as psgc plan -o writes it.")],
    codec: Annotated[str | None, typer.Option(help="Encode with this codec, in place of each bucket's own.")] = None,
    gpu: GpuText = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")] = None,
    forward: Annotated[bool, typer.Option("--forward", help="And the next forward, after the step and overlapped with it.")] = False,
    as_json: Json = False,
) -> None:
    """Predict one step of a plan: how long it takes, who works when, and how much of communication backward hides.

    Example: psgc simulate --profile bert-base --cluster espresso-nvlink --plan plan.json --trace step.json
    """
    check_place(trace, "--trace")
    _check_gpu("simulate", profile, gpu)
    with progress(as_json):
        from psgc.plan.model.forward import with_forward
        from psgc.plan.model.job import codec_of, load_job, recoded
        from psgc.plan.model.lanes import busy_us, overlap, spans
        from psgc.plan.model.plan import load_plan
        from psgc.plan.model.problem import simulate as simulate_plan
        from psgc.plan.report.trace import trace as trace_of
    planned = load_plan(plan)
    own = () if codec else {bucket.codec for bucket in planned.buckets}
    job = load_job(profile, cluster, codec or codec_of(planned.buckets), gpu=gpu, beside=own)
    buckets = recoded(planned.buckets, job.problem.codec.name) if codec else planned.buckets
    found = simulate_plan(job.problem, buckets)
    work = spans(found)
    if trace is not None:
        write(trace, json.dumps(trace_of(found, buckets, f"{planned.model} on {job.problem.cluster.name}")), "--trace")
    lanes = [{"lane": lane, "busy_ms": us / 1e3} for lane, us in busy_us(work).items()]
    answer: dict[str, Any] = {"step_ms": found.step_us / 1e3, "lanes": lanes, "overlap": overlap(work)}
    if forward:
        iteration = with_forward(job.problem, buckets, found)
        answer["iteration_ms"] = {"barrier": iteration.barrier_us / 1e3, "overlapped": iteration.overlapped_us / 1e3}
    if as_json:
        print(json.dumps(answer))
    else:
        _print_step(answer, job.notes)


def _print_step(answer: dict[str, Any], notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}")
    step = answer["step_ms"]
    rows = [[lane["lane"], f"{lane['busy_ms']:.3f}", f"{lane['busy_ms'] / step:.0%}" if step else ""] for lane in answer["lanes"]]
    print_table(["lane", "works, ms", "of the step"], rows)
    print(f"the step takes {step:.3f} ms; backward hides {answer['overlap']:.0%} of communication")
    if "iteration_ms" in answer:
        barrier, overlapped = answer["iteration_ms"]["barrier"], answer["iteration_ms"]["overlapped"]
        print(f"with the next forward {barrier:.3f} ms; {overlapped:.3f} if each layer began as soon as its gradients are there")


def _check_gpu(verb: str, profile: str, gpu: str | None) -> None:
    """Raise UsageError for a GPU beside measured times."""
    if gpu is not None and Path(profile).is_file():
        raise UsageError(f"{verb}: --gpu {gpu}: {profile} is a file, whose times are its own GPU's; --gpu goes with a model's name")


def _check_encodes(codec: str | None, allowed: Constraints, source: str) -> None:
    """Raise UsageError for a codec that nothing could be encoded with."""
    from psgc.plan.model.job import may_encode
    from psgc.plan.model.plan import UNCOMPRESSED

    if codec in (None, UNCOMPRESSED) or may_encode(allowed):
        return
    to_run = ' for a plan to run, which encodes on "cpu" alone' if allowed.runtime and allowed.devices else ""
    raise UsageError(f"plan: --codec {codec}, but {source} rule out all encoding{to_run}; leave one of them out")


def check_place(path: Path | None, flag: str) -> None:
    """Raise UsageError, naming the flag, where a file clearly cannot be written: before the work is done that is to go there."""
    if path is not None and path.is_dir():
        raise UsageError(f"{flag} {path}: Is a directory")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: No such file or directory: {path.parent}")


def write(path: Path, text: str, flag: str) -> None:
    """Write a file that the user asked for. Raises UsageError naming the flag."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
