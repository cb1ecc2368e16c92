"""What ``psgc trace merge`` and ``psgc trace show`` share: flags, and timelines as one trace, as tables and as a document."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.files import write
from psgc.launch.flags import check_gpu
from psgc.launch.tables import print_table, progress

if TYPE_CHECKING:
    from psgc.observe.clocks import Offset
    from psgc.observe.summary import Summary
    from psgc.observe.timeline import Timeline

Folder = Annotated[Path, typer.Argument(help="The folder that PSGC_TRACE named, with the files of all members.")]
PlanFile = Annotated[str | None, typer.Option("--plan", help="Simulate this plan's step beside the measured ones.")]
ProfileFile = Annotated[str | None, typer.Option("--profile", help="With --plan: the profile, or a model's name.")]
ClusterFile = Annotated[str | None, typer.Option("--cluster", help="With --plan: the cluster; default: the plan's own.")]


def tell_traces(
    verb: str, folder: Path, output: Path | None, plan: str | None, profile: str | None, cluster: str | None, gpu: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Read the folder's timelines, print what they come to, and write them as one trace to ``output``. verb: for messages."""
    if (plan is None) != (profile is None):
        raise UsageError(f"{verb}: --plan and --profile belong together: a step is simulated from both")
    if profile is not None:
        check_gpu(verb, profile, gpu)
    with progress(as_json) as tell:
        from psgc.observe.merging import align, merge
        from psgc.observe.summary import summarize
        from psgc.observe.timeline import read_folder

        tell("reading timelines")
        timelines = read_folder(folder)
        offsets = align(timelines)
        summary = summarize(timelines)
        left = ""
        if plan is not None and profile is not None:
            predicted: dict[str, Any] | None = _predicted(verb, plan, profile, cluster, gpu)
        else:
            predicted, left = _by_what_was_left(verb, folder, cluster, gpu)
        if output is not None:
            write(output, json.dumps(merge(timelines, predicted and predicted["trace"])), "--output")
    answer = _answer(timelines, offsets, summary, predicted)
    answer["notes"] += [left] if left else []
    if as_json:
        print(json.dumps(answer))
        return
    for note in answer["notes"]:
        print(f"note: {note}")
    _print(summary, answer)
    if output is not None:
        print(f"{output} opens in ui.perfetto.dev")


def _by_what_was_left(verb: str, folder: Path, cluster: str | None, gpu: str | None) -> tuple[dict[str, Any] | None, str]:
    """The step that is predicted by what the job wrote beside its timelines: simulated where it left a profile, or what its plan says of itself; and a note."""
    from psgc.plan.planfile.reading import load_plan

    plan, profile, machines = (folder / name for name in ("plan.json", "profile.json", "cluster.toml"))
    if not plan.is_file():
        return None, ""
    try:
        if profile.is_file():
            chosen = cluster or (str(machines) if machines.is_file() else None)
            return _predicted(
                verb, str(plan), str(profile), chosen, gpu
            ), f"the prediction is from {plan.name}, {profile.name} and the cluster in {folder}"
        said = load_plan(str(plan)).prediction
        lanes = {str(one["lane"]): 1e3 * float(one["busy_ms"]) for one in said["lanes"]}
        step_us, overlap = 1e3 * float(said["step_ms"]), said.get("overlap")
    except UsageError as error:
        return None, f"no prediction: {error}"
    except (KeyError, TypeError, ValueError):
        return None, ""  # a plan that a job wrote of its layout predicts nothing
    return {"step_us": step_us, "lanes": lanes, "overlap": overlap, "trace": None}, f"the prediction is what {plan} says of its step"


def _predicted(verb: str, plan: str, profile: str, cluster: str | None, gpu: str | None) -> dict[str, Any]:
    """The simulated step: its time, lanes and trace."""
    from psgc.launch.gpu_results import with_measured_codecs
    from psgc.plan.model.job import codec_of, load_job
    from psgc.plan.model.lanes import busy_us, overlap, spans
    from psgc.plan.model.problem import simulate
    from psgc.plan.planfile.reading import load_plan
    from psgc.plan.report.trace import trace

    planned = load_plan(plan)
    chosen = cluster or planned.machines
    if chosen is None:
        raise UsageError(f"{verb}: {plan} does not say for which cluster it is; name one with --cluster")
    codecs = {bucket.codec for bucket in planned.buckets}
    job = load_job(profile, chosen, codec_of(planned.buckets), gpu=gpu, beside=codecs, measured=with_measured_codecs)
    found = simulate(job.problem, planned.buckets)
    work = spans(found)
    title = f"{planned.model} on {job.problem.cluster.name}"
    return {"step_us": found.step_us, "lanes": busy_us(work), "overlap": overlap(work), "trace": trace(found, planned.buckets, title)}


def _answer(
    timelines: list[Timeline], offsets: list[Offset], summary: Summary, predicted: dict[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    lanes = []
    for lane in dict.fromkeys([*summary.lanes, *(predicted["lanes"] if predicted else ())]):
        measured = summary.lanes.get(lane)
        row: dict[str, Any] = {"lane": lane, "busy_ms": None if measured is None else measured / 1e3}
        if predicted:
            row["predicted_ms"] = predicted["lanes"].get(lane, 0.0) / 1e3 if lane in predicted["lanes"] else None
            row["predicted_over_measured"] = row["predicted_ms"] / row["busy_ms"] if row["predicted_ms"] and row["busy_ms"] else None
        if measured or (predicted and row["predicted_ms"]):
            lanes.append(row)
    answer: dict[str, Any] = {
        "step_ms": None if summary.step_us is None else summary.step_us / 1e3, "exchange_ms": summary.exchange_us / 1e3,
        "ranks": [_in_ms(asdict(rank)) for rank in summary.ranks], "lanes": lanes,
        "slowest_rank": summary.slowest, "slowest_in_steps": summary.slowest_in, "compared_steps": summary.compared,
        "clocks": [
            {"member": one.about.name, "offset_ms": offset.us / 1e3, "uncertain_ms": None if offset.uncertain_us is None else offset.uncertain_us / 1e3}
            for one, offset in zip(timelines, offsets, strict=True)
        ],
        "notes": list(_notes(timelines, offsets, summary)),
    }  # fmt: skip
    if predicted:
        answer["predicted"] = {"exchange_ms": predicted["step_us"] / 1e3, "overlap": predicted["overlap"]}
    return answer


def _in_ms(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removesuffix("_us") + ("_ms" if name.endswith("_us") else ""): value / 1e3 if name.endswith("_us") and value is not None else value
        for name, value in values.items()
    }  # fmt: skip


def _notes(timelines: list[Timeline], offsets: list[Offset], summary: Summary) -> list[str]:
    notes = []
    first = timelines[0].about
    if not summary.ranks:
        notes.append(
            f"no spans: the job's longest count of steps was {max(one.about.steps for one in timelines)}, and steps {first.first} to {first.last} were "
            f"traced; set PSGC_TRACE_START_STEP and PSGC_TRACE_END_STEP"
        )
    missing = [
        rank for rank in range(sum(first.node_sizes)) if all((one.about.role, one.about.index) != ("rank", rank) for one in timelines)
    ]
    if missing:
        notes.append(f"the timelines of rank {', '.join(map(str, missing))} are not there; copy them into the folder")
    notes += [f"{one.about.name} had no room for {one.about.dropped} spans; trace fewer steps" for one in timelines if one.about.dropped]
    for one, offset in zip(timelines, offsets, strict=True):
        if offset.uncertain_us is None:
            notes.append(f"nothing relates the clock of {one.about.name} to that of {first.name}; its times are as they were")
    return notes


def _print(summary: Summary, answer: dict[str, Any]) -> None:
    if not summary.ranks:
        return
    rows = [
        [
            str(rank["rank"]), _ms(rank["step_ms"]), _ms(rank["exchange_ms"]), _ms(rank["waiting_ms"]), _ms(rank["exposed_ms"]),
            f"{rank['overlap']:.0%}", f"{rank['bytes'] / 1e6:.3g}", _ms(rank["late_ms"]),
        ]
        for rank in answer["ranks"]
    ]  # fmt: skip
    header = ["rank", "step, ms", "to last mean", "waits", "exposed", "overlap", "MB a step", "late by"]
    print_table(header, rows)
    predicted = answer.get("predicted")
    lanes = [
        [row["lane"], _ms(row["busy_ms"]), *([_ms(row["predicted_ms"]), _ratio(row["predicted_over_measured"])] if predicted else ())]
        for row in answer["lanes"]
    ]
    if predicted:
        ratio = predicted["exchange_ms"] / answer["exchange_ms"] if answer["exchange_ms"] else None
        lanes.append(["first gradient to last mean", _ms(answer["exchange_ms"]), _ms(predicted["exchange_ms"]), _ratio(ratio)])
    print_table(["lane", "works, ms a step", *(["predicted", "predicted / measured"] if predicted else ())], lanes)
    if summary.slowest is not None:
        print(f"rank {summary.slowest} was the last to have its gradients in {summary.slowest_in} of {summary.compared} steps")
    uncertain = [clock["uncertain_ms"] for clock in answer["clocks"] if clock["uncertain_ms"]]
    if uncertain:
        print(f"clocks of other machines are corrected, to {max(uncertain):.3f} ms")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
