"""The verb ``psgc simulate``: a plan in; its step as tables, JSON and a trace out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.files import check_place, write
from psgc.launch.flags import GpuText, Json, ProfileText, check_gpu
from psgc.launch.tables import print_table, progress


@compiles_on_call
def simulate(
    profile: ProfileText,
    plan: Annotated[str, typer.Option(help="The plan, as psgc plan -o writes it.")],
    cluster: Annotated[str | None, typer.Option(help="Cluster: TOML, or the name of a ready-made one; default: the plan's own.")] = None,
    codec: Annotated[str | None, typer.Option(help="Encode with this codec, in place of each bucket's own.")] = None,
    gpu: GpuText = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="Also simulate the next forward pass, after the step and overlapped with it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict one step of a plan: how long it takes, who works when, and how much of communication backward hides.

    Example: psgc simulate --profile bert-base --plan plan.json --trace step.json
    """
    check_place(trace, "--trace")
    check_gpu("simulate", profile, gpu)
    with progress(as_json):
        from psgc.launch.gpu_results import with_measured_codecs
        from psgc.plan.model.forward import with_forward
        from psgc.plan.model.job import codec_of, load_job, recoded
        from psgc.plan.model.lanes import busy_us, overlap, spans
        from psgc.plan.model.problem import simulate as simulate_plan
        from psgc.plan.planfile.reading import load_plan
        from psgc.plan.planfile.runtime import why_not_run
        from psgc.plan.report.running import moved_us
        from psgc.plan.report.trace import trace as trace_of
    planned = load_plan(plan)
    own = () if codec else {bucket.codec for bucket in planned.buckets}
    chosen = cluster or planned.machines
    if chosen is None:
        raise UsageError(f"simulate: {plan} does not say for which cluster it is; name one with --cluster")
    job = load_job(profile, chosen, codec or codec_of(planned.buckets), gpu=gpu, beside=own, measured=with_measured_codecs)
    buckets = recoded(planned.buckets, job.problem.codec.name) if codec else planned.buckets
    found = simulate_plan(job.problem, buckets)
    work = spans(found)
    if trace is not None:
        write(trace, json.dumps(trace_of(found, buckets, f"{planned.model} on {job.problem.cluster.name}")), "--trace")
    lanes = [{"lane": lane, "busy_ms": us / 1e3} for lane, us in busy_us(work).items()]
    refused = why_not_run(planned, plan)
    moved = moved_us(job.problem, buckets)
    answer: dict[str, Any] = {"step_ms": found.step_us / 1e3, "lanes": lanes, "overlap": overlap(work), "runnable": refused is None}
    if forward:
        iteration = with_forward(job.problem, buckets, found)
        answer["iteration_ms"] = {"barrier": iteration.barrier_us / 1e3, "overlapped": iteration.overlapped_us / 1e3}
    if as_json:
        print(json.dumps(answer))
    else:
        lacks = f"{plan} lacks {' and '.join(planned.unknown)}"
        told = "this version of psgc runs the plan" if refused is None else f"this version of psgc does not run the plan: {refused}"
        if refused is None and moved is not None:
            told += ", but moves its collectives between GPUs through hosts' memory, since the cluster names nothing else (collectives), "
            told += f"and takes {moved / 1e3:.3f} ms"
        _print_step(answer, (*job.notes, *([lacks] if planned.unknown else []), told))


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
