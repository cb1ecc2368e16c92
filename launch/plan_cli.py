"""The verbs of ``psgc`` that ask instead of run: ``options`` and ``whatif``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.tables import print_table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(options)
    app.command()(whatif)


def options(
    gpu_only: Annotated[bool, typer.Option("--gpu-only", help="Encode and decode on GPUs only.")] = False,
    most_encodes: Annotated[int | None, typer.Option(help="How often a bucket may be encoded.")] = None,
    flat: Annotated[bool, typer.Option("--flat/--no-flat", help="Options that know no nodes.")] = True,
    servers: Annotated[bool, typer.Option("--servers", help="Those over servers, too.")] = False,
    as_json: Json = False,
) -> None:
    """List the ways that a bucket can take through groups and servers.

    Example: psgc options --gpu-only --most-encodes 1
    """
    from psgc.plan.options import DEVICES, Constraints, all_options, constrained, encodes, is_uncompressed, subtree_sizes

    if most_encodes is not None and most_encodes < 0:
        raise UsageError(f"options: --most-encodes {most_encodes}: expected at least 0")
    chosen = constrained(Constraints(DEVICES[:1] if gpu_only else DEVICES, most_encodes, flat, True, servers))
    if as_json:
        counts = {"count": len(chosen), "gpu_only": len(all_options(("gpu",))), "uncompressed": sum(map(is_uncompressed, chosen))}
        print(json.dumps({**counts, "subtrees": subtree_sizes(), "options": [list(option) for option in chosen]}))
        return
    for number in range(max(map(encodes, chosen), default=-1) + 1):
        print(f"{sum(encodes(option) == number for option in chosen)} options that encode {number} times")
    for option in chosen:
        print("  " + "  ".join(option))


def whatif(
    cases: Annotated[Path | None, typer.Option(help="A JSON file of questions; see docs/plans.md.")] = None,
    model: Annotated[str | None, typer.Option(help="A well-known model, for the gradient's bytes.")] = None,
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
    plot: Annotated[Path | None, typer.Option(help="Write a picture of times against bandwidth.")] = None,
    as_json: Json = False,
) -> None:
    """Would compression pay? The closed model of "On the Utility of Gradient Compression", with a margin.

    Example: psgc whatif --model resnet50 --method powersgd --backward-ms 122 --encode-ms 45 --gpus 64 --bandwidth 10
    """
    if cases is not None:
        _answer_cases(cases, as_json)
        return
    from psgc.plan.verdict import Question, picture, verdict

    if backward_ms is None:
        raise UsageError("whatif: --backward-ms is missing: how long backward takes on one GPU")
    question = Question(model, grad_mib, method, gpus, bandwidth, backward_ms, encode_ms, rank, k, ratio, alpha_us)
    found = verdict(question)
    if plot is not None:
        picture(question, plot)
    if as_json:
        print(json.dumps(found))
        return
    print_table(["", ""], [[key.replace("_", " "), _shown(value)] for key, value in found.items() if key not in ("verdict", "warnings")])
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    print(found["verdict"])


def _answer_cases(path: Path, as_json: bool) -> None:
    from psgc.plan.cases import run_cases

    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"whatif: --cases {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"whatif: --cases {path}: no valid JSON: {error}") from None
    found = run_cases(document)
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
