"""The verb ``psgc profile``: flags in, a profile out. ``launch/profiling/`` does the measuring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgc.errors import UsageError
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress
from psgc.launch.usage import refuse_beside
from psgc.plan.inputs.cluster import Link, read_link
from psgc.transport.registry import choices

if TYPE_CHECKING:
    from psgc.launch.profiling.measure import Request
    from psgc.plan.inputs.carriers import CarrierCosts
    from psgc.plan.inputs.profile import Profile


def profile(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="With --script: what every worker runs.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="A well-known model: ready times are computed.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU that --model is computed for, or what one achieves in TFLOP/s.")] = "v100",
    script: Annotated[bool, typer.Option("--script", help="Run CMD, a psgc job, on this machine and time its gradients.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A trace of an ordinary training: of torch.profiler (JSON), or of Nsight Systems (SQLite).")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes of CMD; nodes of --cluster-out.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes of CMD; servers of --cluster-out.")] = 1,
    iterations: Annotated[int, typer.Option(help="Iterations observed, after a warm-up.")] = 20,
    codecs: Annotated[
        str | None, typer.Option(help="Codecs to time on this CPU, with commas between them. Default: none,bf16,fp16,int8,onebit,topk.")
    ] = None,
    time_codecs: Annotated[bool, typer.Option("--time-codecs/--no-codecs", help="Whether codecs are timed at all.")] = True,
    links: Annotated[bool, typer.Option("--links", help="Measure what messages cost here: to a server, and among workers.")] = False,
    join: Annotated[
        bool, typer.Option("--join", help="With --links: to the server of the job that DMLC_* names, whose one worker this is.")
    ] = False,
    transport: Annotated[str, typer.Option(help=f"What --links measures: one of {', '.join(choices())}.")] = "auto",
    inter_gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of the nodes' links, for --cluster-out; TCP carries 0.956 of it.")
    ] = None,
    inter_latency_us: Annotated[float | None, typer.Option(help="Latency between nodes, for --cluster-out.")] = None,
    cluster_out: Annotated[Path | None, typer.Option(help="Write the links as a cluster.toml.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what plans need: when gradients become ready, what codecs cost on this CPU, what messages cost.

    Example: psgc profile --script --workers 2 -o profile.json -- python train.py

    Example: psgc profile --trace trace.json -o profile.json
    """
    if script and not command:
        raise UsageError("profile: --script without a command; for example: psgc profile --script -- python train.py")
    if command and not script:
        raise UsageError(f"profile: unexpected {command[0]!r}; to profile a job write --script -- before its command")
    if model is None:
        refuse_beside(context, ("gpu",), "only with --model, whose times are computed; others are measured here")
    if not script:
        refuse_beside(context, ("iterations",), "only with --script")
    if not script and cluster_out is None:
        refuse_beside(context, ("workers", "servers"), "only with --script or --cluster-out")
    if not links:
        refuse_beside(context, ("transport",), "only with --links")
    if codecs and not time_codecs:
        raise UsageError(f"profile: --codecs {codecs} and --no-codecs: leave one of them out")
    with progress(as_json):
        from psgc.launch.profiling.measure import Request, cluster_of, measure
        from psgc.plan.inputs.observed import unsteady

        request = Request(
            model, gpu, tuple(command or ()), workers, servers, iterations,
            _codec_list(codecs) if time_codecs and (codecs or model or script) else (),
            transport if links else None, join, _given_link(inter_gbps, inter_latency_us), trace, time_codecs,
        )  # fmt: skip
    _check_outputs(request, output, cluster_out)
    found = measure(request, not as_json, lambda measured: _keep(output, measured))
    if warning := unsteady(found):
        print(f"psgc profile: warning: {warning}", file=sys.stderr)
    if cluster_out is not None:
        from psgc.launch.topology import detect

        cluster, comments = cluster_of(request, found, detect())
        _write(cluster_out, cluster.to_toml(comments))
    if output is not None:
        _write_profile(output, found)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _tell(found)


def _codec_list(text: str | None) -> tuple[str, ...]:
    """The codecs that ``--codecs`` names, or the usual ones. Raises CodecError for an unknown codec."""
    from psgc.codecs.common.texts import split_texts
    from psgc.launch.profiling.curves import DEFAULT_CODECS, curve_codecs

    return DEFAULT_CODECS if text is None else tuple(curve_codecs(split_texts(text)))


def _given_link(gbps: float | None, latency_us: float | None) -> Link | None:
    if gbps is None and latency_us is None:
        return None
    if gbps is None or latency_us is None:
        raise UsageError("profile: --inter-gbps and --inter-latency-us describe one link; give both")
    return read_link({"gbps": gbps, "latency_us": latency_us}, "inter", "profile: --inter-gbps and --inter-latency-us")


def _check_outputs(request: Request, output: Path | None, cluster_out: Path | None) -> None:
    """Raise UsageError, before anything is measured, if a file cannot be written or would have no content."""
    for path in (output, cluster_out):
        if path is not None and path.is_dir():
            raise UsageError(f"profile: cannot write {path}: it is a folder")
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"profile: cannot write {path}: no folder {path.parent}")
    if not request.command and request.model is None and request.trace is None and output is not None:
        raise UsageError("profile: -o writes a model's profile; give --model, --script or --trace, too (--cluster-out writes links alone)")
    if cluster_out is not None and request.transport is None and request.inter is None:
        raise UsageError("profile: --cluster-out without links; give --links, or --inter-gbps and --inter-latency-us")


def _keep(output: Path | None, measured: Profile) -> None:
    """Write what the job has measured, so that whoever ends the command meanwhile has it."""
    if output is not None:
        _write_profile(output, measured)
        print(f"psgc profile: {output} has what the job has measured; what is measured now is added at the end", file=sys.stderr)


def _write_profile(output: Path, found: Profile) -> None:
    _write(output, json.dumps(found.to_json(), indent=1))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n" * (not text.endswith("\n")))
    except OSError as error:
        raise UsageError(f"profile: cannot write {path}: {error.strerror}") from None


def _tell(found: Profile) -> None:
    rows = []
    if found.tensors:
        rows = [["model", found.model], ["tensors", f"{len(found.tensors)}, {found.numel:,} elements"]]
    if found.tensors and "backward_us" not in found.spread:  # it is computed
        rows.append(["backward", f"{found.backward_us / 1e3:,.3f} ms"])
    rows += [[_words(total), f"{s.median / 1e3:,.3f} ms, interquartile range {s.iqr / 1e3:,.3f}"] for total, s in found.spread.items()]
    print_table(["", ""], [*rows, ["source", found.source], ["hardware", found.hardware]])
    if found.codecs:
        print_table(
            ["codec", "device", "encode us", "decode us"], _curve_rows(found), title="1M elements; on a server: finish, and add one payload"
        )
    costs = [[f"{name} link", f"{link.gbps:,.1f} Gbit/s, {link.latency_us:,.0f} us"] for name, link in found.links.items()]
    costs += [[name, _carrier_text(each)] for name, each in found.carriers.items()]
    if costs:
        print_table(["", ""], costs)


def _carrier_text(costs: CarrierCosts) -> str:
    members = f", {costs.peer_us:,.0f} for each member beyond two" if costs.peer_us else ""
    return f"{costs.lone_us:,.0f} us an operation alone, {costs.each_us:,.0f} for each further one{members}; {costs.gbps:,.1f} Gbit/s"


def _words(name: str) -> str:
    return name.removesuffix("_us").replace("_", " ")


def _curve_rows(found: Profile) -> list[list[str]]:
    numel = 1 << 20
    return [
        [name, device, f"{curve.encode(numel):,.0f}", f"{curve.decode(numel):,.0f}"]
        for name, devices in found.codecs.items()
        for device, curve in devices.items()
    ]
