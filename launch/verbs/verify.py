"""The verb ``psgc verify``: a plan and a job in; predicted beside measured steps out, and a corrected profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import JobFailed, UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.files import check_place, write
from psgc.launch.flags import GpuText, Json, check_gpu
from psgc.launch.tables import print_table, print_text, progress

if TYPE_CHECKING:
    from psgc.plan.report.verification import Candidate, Verification

WINDOW_STEPS = 5


@compiles_on_call
def verify(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The plan, as psgc plan --runnable -o writes it.")],
    profile: Annotated[str, typer.Option(help="The profile that the plan was made from, into which the correction is written.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs, a psgc job.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each candidate, in windows of 5.", min=5, max=10_000)] = 30,
    cluster: Annotated[str | None, typer.Option(help="Cluster: TOML, or a ready-made one's name; default: the plan's own.")] = None,
    gpu: GpuText = None,
    nodes: Annotated[int | None, typer.Option(help="As of psgc run.")] = None,
    link_mbit: Annotated[float | None, typer.Option(help="As of psgc run: a simulated link of this rate, 1e6 bit/s.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="In place of CMD: what a job on several machines wrote to the file that PSGC_VERIFY named."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="With --measured: the folder of that job's timelines (PSGC_TRACE), steps 3 to 7.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the corrected profile here, not to --profile's file.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with what was predicted beside what was measured, by lane.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a plan in the job itself, in turns with its plain codec, bf16 and none, beside what was predicted; and correct the profile.

    Example: psgc verify plan.json --profile profile.json -- python train.py
    """
    if bool(command) == (measured is not None):
        raise UsageError("verify: give either the job's command after --, or --measured with what a job wrote")
    if trace is not None and measured is None:
        raise UsageError("verify: --trace goes with --measured; a job that verify starts is traced by itself")
    if not Path(profile).is_file() or Path(profile).suffix == ".csv":
        raise UsageError(
            f"verify: --profile {profile}: expected the file of a profile that psgc profile wrote, which the correction is written into"
        )
    check_gpu("verify", profile, gpu)
    place = output or Path(profile)
    check_place(place, "--output" if output else "--profile")
    check_place(report, "--report")
    with progress(as_json):
        from psgc.plan.planfile.runtime import load_runnable
    planned = load_runnable(plan)
    chosen = cluster or planned.machines
    if chosen is None:
        raise UsageError(f"verify: {plan} does not say for which cluster it is; name one with --cluster")
    with tempfile.TemporaryDirectory(prefix="psgc-verify-") as folder:
        if command:
            workers, servers = planned.shape.workers, planned.shape.servers
            if workers is None or servers is None:
                raise UsageError(f"verify: {plan} does not say for how many workers and servers it is; make it anew with psgc plan")
            measured, trace = Path(folder) / "measured.json", Path(folder) / "trace"
            _run(command, plan, measured, trace, steps, workers, servers, nodes, link_mbit)
        assert measured is not None
        candidates = _read(measured, trace)
    found = _verified(profile, chosen, candidates, gpu)
    document = json.loads(Path(profile).read_text())
    write(place, json.dumps({**document, "correction": found.correction.to_json()}, indent=1), "--output" if output else "--profile")
    from psgc.plan.report.verification import document as shown

    if report is not None:
        from psgc.plan.report.measured import page

        write(report, page(found, Path(plan).name), "--report")
    if as_json:
        print(json.dumps({**shown(found), "profile": str(place)}))
    else:
        _print(found, place)


def _run(
    command: list[str], plan: str, measured: Path, trace: Path, steps: int, workers: int, servers: int, nodes: int | None, link_mbit: float | None
) -> None:  # fmt: skip
    """Run the job until it has measured itself. Its output goes to stderr."""
    env = {
        **os.environ, "PSGC_VERIFY": str(measured), "PSGC_VERIFY_ROUNDS": str(-(-steps // WINDOW_STEPS)), "PSGC_TRACE": str(trace),
        "PSGC_TRACE_START_STEP": "3", "PSGC_TRACE_END_STEP": "7",
    }  # fmt: skip
    where = ["--nodes", str(nodes)] if nodes is not None else []
    where += ["--link-mbit", f"{link_mbit:g}"] if link_mbit is not None else []
    run = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--workers",
        str(workers),
        "--servers",
        str(servers),
        "--plan",
        plan,
        *where,
        "--",
        *command,
    ]
    status = subprocess.run(run, env=env, stdout=sys.stderr, check=False).returncode
    if status:
        raise JobFailed(f"verify: the job failed with status {status}; its output is above")
    if not measured.exists():
        raise JobFailed(
            "verify: the job ended before it was measured: let it run for longer, or give fewer --steps (each candidate takes half as many again to settle)"
        )


def _read(measured: Path, trace: Path | None) -> list[Candidate]:
    """The candidates that a job measured. Raises UsageError naming the file."""
    from psgc.plan.inputs.documents import read_document
    from psgc.plan.planfile.reading import read_plan
    from psgc.plan.report.verification import Candidate

    document = read_document(measured, str(measured))
    lanes = {} if trace is None or not trace.is_dir() else _lanes_of(trace)
    try:
        return [
            Candidate(
                each["name"], read_plan(each["plan"], str(measured)).buckets, tuple(window["step_us"] / 1e3 for window in each["windows"]),
                min((window["forward_us"] + window["backward_us"]) / 1e3 for window in each["windows"]),
                _summed(lanes, [name for window in each["windows"] for name in window["layouts"]]),
            )
            for each in document["candidates"]
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{measured}: expected what a job with PSGC_VERIFY writes; {type(error).__name__}: {error}") from None


def _lanes_of(trace: Path) -> dict[str, dict[str, float]]:
    """Milliseconds that each lane works in a step, by layout."""
    from dataclasses import replace

    from psgc.observe.summary import summarize
    from psgc.observe.timeline import read_folder

    timelines = read_folder(trace)
    names = {event["args"]["layout"] for one in timelines for event in one.events}
    found = {}
    for name in names:
        of_layout = [replace(one, events=[event for event in one.events if event["args"]["layout"] == name]) for one in timelines]
        found[name] = {lane: us / 1e3 for lane, us in summarize(of_layout).lanes.items()}
    return found


def _summed(lanes: dict[str, dict[str, float]], layouts: list[str]) -> dict[str, float]:
    """The median over windows of each lane's work."""
    import statistics

    known = [lanes[name] for name in layouts if name in lanes]
    every = dict.fromkeys(lane for one in known for lane in one)
    return {lane: statistics.median_low([one.get(lane, 0.0) for one in known]) for lane in every if lane != "backward"}


def _verified(profile: str, cluster: Any, candidates: list[Candidate], gpu: str | None) -> Verification:
    from dataclasses import replace
    from datetime import datetime, timezone

    from psgc.launch.gpu_results import with_measured_codecs
    from psgc.plan.inputs.cluster import load_cluster
    from psgc.plan.inputs.correction import Correction, Factors
    from psgc.plan.inputs.profile import load_profile
    from psgc.plan.model.job import codec_of, problem_of_profile
    from psgc.plan.model.problem import Problem
    from psgc.plan.report.verification import verify as verified

    own = replace(load_profile(profile), correction=None)
    machines = load_cluster(cluster) if isinstance(cluster, str) else cluster

    def problems(factors: Factors) -> Any:
        changed = replace(own, correction=Correction(factors, 0.0))

        def problem(one: Candidate) -> Problem:
            codecs = {bucket.codec for bucket in one.buckets}
            return problem_of_profile(changed, machines, codec_of(one.buckets), codecs, measured=with_measured_codecs, gpu=gpu)

        return problem

    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return verified(candidates, problems, date, machines.name)


def _print(found: Verification, place: Path) -> None:
    from psgc.plan.report.verification import document

    shown = document(found)
    rows = [
        [
            one["name"], f"{one['measured_ms']:,.1f}", f"{each.scatter:.0%}", f"{one['predicted_ms']:,.1f}", f"{one['error']:+.1%}",
            f"{one['farthest_lane']} {one['farthest_ms']:+,.1f}", f"{one['corrected_ms']:,.1f}", f"{one['corrected_error']:+.1%}",
        ]
        for one, each in zip(shown["candidates"], found.candidates, strict=True)
    ]  # fmt: skip
    print_table(["", "measured, ms", "scatter", "predicted", "error", "lane farthest off", "corrected", "error"], rows)
    for one in shown["candidates"]:
        lanes = [
            [lane["lane"], *("" if lane[key] is None else f"{lane[key]:,.1f}" for key in ("predicted_ms", "measured_ms"))]
            for lane in one["lanes"]
            if lane["predicted_ms"] or lane["measured_ms"]
        ]
        print_table(["lane", "predicted, ms", "measured"], lanes, title=one["name"])
    factors = ", ".join(f"{name} {value:.3g}" for name, value in shown["factors"].items())
    print_text(f"{place} has the correction ({factors}); corrected predictions are within {shown['error']:.1%} of these steps")
    sys.stdout.flush()
