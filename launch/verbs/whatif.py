"""The verb ``psgc whatif``: would compression pay, by the closed model or on a profile's timeline?"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.files import check_place
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress
from psgc.launch.usage import refuse_beside

if TYPE_CHECKING:
    from psgc.plan.whatif.verdict import Times


BASELINE_BYTES = {"fp32": 4.0, "bf16": 2.0}  # bytes an element
# Which flags each of the two models takes.
TIMELINE_FLAGS = ("cluster", "codec", "gpu", "over")
CLOSED_MODEL_FLAGS = ("model", "method", "gpus", "bandwidth", "backward_ms", "encode_ms", "grad_mib", "rank", "k", "ratio", "alpha_us")
LABELS = {
    "sync_ms": "uncompressed, ms", "method_ms": "with the method, ms", "gain": "saved over fp32", "margin": "margin of that",
    "bf16_ms": "bf16 gradients, uncompressed, ms", "gain_over_bf16": "saved over bf16", "margin_over_bf16": "margin of that",
    "codec_ms": "encoding and decoding, ms", "crossover_gbps": "faster below, Gbit/s", "required_ratio": "ratio that would hide behind backward",
    "encode_budget_ms": "pays if encoding takes under, ms",
}  # fmt: skip
SHARES = ("gain", "margin", "gain_over_bf16", "margin_over_bf16")
COMMON_FLAGS = ("measured_ms", "plot")
METHOD_OF_FLAG = {"rank": "powersgd", "k": "mstopk", "ratio": "sync_compressed"}


@compiles_on_call
def whatif(
    context: typer.Context,
    cases: Annotated[Path | None, typer.Option(help="A JSON file of questions; see docs/paying.md.")] = None,
    profile: Annotated[str | None, typer.Option(help="Ask the timeline: a profile, or a well-known model's name.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The timeline's cluster: a TOML file or a name.")] = None,
    codec: Annotated[str, typer.Option(help="The timeline's codec.")] = "int8",
    gpu: Annotated[str | None, typer.Option(help="The timeline's GPU, to estimate codec times that the profile has not.")] = None,
    over: Annotated[
        str, typer.Option(help="What the timeline's gain is over: fp32 gradients, with bf16 told beside them, or bf16.")
    ] = "fp32",
    model: Annotated[str | None, typer.Option(help="Ask the closed model: a well-known model, for the gradient's bytes.")] = None,
    method: Annotated[str, typer.Option(help="powersgd, mstopk, signsgd or sync_compressed.")] = "powersgd",
    gpus: Annotated[int, typer.Option(help="GPUs.")] = 64,
    bandwidth: Annotated[float, typer.Option(help="Gbit/s of a GPU's link.")] = 10.0,
    backward_ms: Annotated[float | None, typer.Option(help="Backward on one GPU.")] = None,
    encode_ms: Annotated[float, typer.Option(help="Encode and decode of the whole gradient.")] = 0.0,
    grad_mib: Annotated[float | None, typer.Option(help="MiB of fp32 gradient, in place of --model's.")] = None,
    rank: Annotated[int, typer.Option(help="PowerSGD's rank.")] = 4,
    k: Annotated[float, typer.Option(help="Top-k's share.")] = 0.01,
    ratio: Annotated[float, typer.Option(help="sync_compressed's ratio.")] = 2.0,
    alpha_us: Annotated[float, typer.Option(help="Latency of a message.")] = 0.0,
    measured_ms: Annotated[
        float | None, typer.Option(help="Measured iteration time without compression: warns of predictions that it contradicts.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture: bandwidths, faster computers, other codecs.")] = None,
    as_json: Json = False,
) -> None:
    """Would compression pay? By the closed model of "On the Utility of Gradient Compression", or on a profile's timeline; with a margin.

    Example: psgc whatif --model resnet50 --method powersgd --backward-ms 122 --encode-ms 45 --gpus 64 --bandwidth 10
    """
    _check_flags(context, cases is not None, profile is not None, method)
    check_place(plot, "whatif: --plot")
    if measured_ms is not None and not 0 < measured_ms < math.inf:
        raise UsageError(f"whatif: --measured-ms {measured_ms:g}: expected the milliseconds of an iteration without compression, above 0")
    if cases is not None:
        _answer_cases(cases, as_json)
    elif profile is not None:
        with progress(as_json):
            times, notes = _on_timeline(profile, cluster, codec, gpu, measured_ms, over)
        _answer(times, plot, as_json, notes)
    else:
        from psgc.plan.whatif.closed_model import ClosedTimes, Question

        if not 0 < k <= 1:
            raise UsageError(f"whatif: --k {k:g}: expected the share of elements that top-k sends, above 0 and at most 1")
        if model is not None and grad_mib is not None:
            raise UsageError("whatif: --model and --grad-mib both say how large the gradient is; give one")
        if backward_ms is None:
            raise UsageError("whatif: --backward-ms is missing: how long backward takes on one GPU; or give --profile and --cluster")
        question = Question(model, grad_mib, method, gpus, bandwidth, backward_ms, encode_ms, rank, k, ratio, alpha_us, measured_ms)
        _answer(ClosedTimes(question), plot, as_json)


def _check_flags(context: typer.Context, cases: bool, profile: bool, method: str) -> None:
    """Raise UsageError for a flag that the chosen model would ignore."""
    if cases:
        refuse_beside(
            context, ("profile", *TIMELINE_FLAGS, *CLOSED_MODEL_FLAGS, *COMMON_FLAGS), "the questions in --cases have inputs of their own"
        )
    elif profile:
        refuse_beside(context, CLOSED_MODEL_FLAGS, "for the closed model, but --profile asks the timeline; leave one of them out")
    else:
        refuse_beside(context, TIMELINE_FLAGS, "only with --profile, for its timeline; the closed model takes --gpus and --bandwidth")
        others = {name: owner for name, owner in METHOD_OF_FLAG.items() if owner != method}
        refuse_beside(context, others, f"not for --method {method}; {', '.join(f'--{n} is for {o}' for n, o in others.items())}")


def _on_timeline(
    profile: str, cluster: str | None, codec: str, gpu: str | None, measured_ms: float | None, over: str
) -> tuple[Times, tuple[str, ...]]:
    from psgc.launch.gpu_results import with_measured_codecs
    from psgc.plan.model.job import load_job
    from psgc.plan.whatif.candidates import ESTIMATED, MEASURED
    from psgc.plan.whatif.on_timeline import TimelineTimes

    if over not in BASELINE_BYTES:
        raise UsageError(f"whatif: --over {over!r}: choose one of {', '.join(BASELINE_BYTES)}")
    if cluster is None:
        raise UsageError("whatif: --cluster is missing: a TOML file, or the name of a ready-made cluster")
    job = load_job(profile, cluster, codec, gpu=gpu, measured=with_measured_codecs)
    return TimelineTimes(job.problem, ESTIMATED if job.estimated else MEASURED, measured_ms, BASELINE_BYTES[over]), job.notes


def _answer(times: Times, plot: Path | None, as_json: bool, notes: Sequence[str] = ()) -> None:
    """notes: what was assumed."""
    from psgc.plan.whatif.verdict import verdict

    found = {**verdict(times), "notes": list(notes)}
    if plot is not None:
        from psgc.plan.whatif.pictures import picture

        picture(times, found, plot)
    if as_json:
        print(json.dumps(found))
        return
    shown = {key: value for key, value in found.items() if not isinstance(value, list | str)}
    rows = [[LABELS[key], f"{value:.1%}" if key in SHARES else _shown(value)] for key, value in shown.items()]
    rows += [[f"gain, compute {one['factor']:g}x as fast", f"{one['gain']:.1%}"] for one in found["faster_compute"]]
    rows += [
        [f"gain, {_trade(one)}", f"{one['gain']:.1%}"]
        for one in found["trade_off"]
        if (one["codec_factor"] == 1) != (one["payload_factor"] == 1)
    ]
    print_table(["", ""], rows)
    for note in notes:
        print(f"note: {note}")
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    print(found["verdict"])


def _trade(one: dict[str, Any]) -> str:
    if one["payload_factor"] == 1:
        return f"{one['codec_factor']:g}x the time to encode and decode"
    return f"{one['payload_factor']:g}x the bytes of payload"


def _answer_cases(path: Path, as_json: bool) -> None:
    from psgc.plan.inputs.documents import read_document
    from psgc.plan.whatif.cases import run_cases

    found = run_cases(read_document(path, f"whatif: --cases {path}"))
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        [case["id"], case["quantity"], _shown(case["value"]), "as expected" if case["pass"] else "NOT as expected"]
        for case in found["cases"]
    ]
    print_table(["case", "quantity", "value", ""], rows)
    print(f"{found['passed']} as expected, {found['failed']} not")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1e6 else f"{value:,.0f}"
    return "unbounded" if value is None else str(value)
