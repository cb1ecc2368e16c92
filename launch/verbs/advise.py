"""The verb ``psgc advise``: which of three ways of exchanging gradients pays on a link."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from psgc.errors import UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, print_text, progress
from psgc.launch.usage import refuse_beside

MOST_TOKENS, MOST_MEMORY_GBPS, MOST_PRICE = 10**9, 1e6, 1e9  # a typing error beyond


@compiles_on_call
def advise(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Number of machines.")],
    link: Annotated[float, typer.Option(help="Gbit/s of a machine's link, one way.")],
    model: Annotated[str | None, typer.Option(help="A well-known model, its times computed; --profile has measured ones.")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile: JSON, or a CSV table of tensors.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU: v100, t4, a10g, a100, h100, h200, or what it achieves in TFLOP/s.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs a machine; they share its link.")] = 8,
    tokens: Annotated[int | None, typer.Option(help="Tokens (or images) a GPU and step, with --model or --goodput.")] = None,
    latency_us: Annotated[float, typer.Option(help="Of a message between machines.")] = 20.0,
    memory: Annotated[float | None, typer.Option(help="GB/s of the GPU's memory, for a --gpu given in TFLOP/s.")] = None,
    intra: Annotated[float | None, typer.Option(help="Gbit/s between a machine's GPUs, if not what such GPUs have.")] = None,
    cores: Annotated[
        int | None, typer.Option(help="CPU cores a machine, where codecs run; left out: 4 a GPU, which psgc's threads use.")
    ] = None,
    host: Annotated[float | None, typer.Option(help="Gbit/s between a GPU and its host, if not what such GPUs have.")] = None,
    servers: Annotated[int, typer.Option(help="CPU servers that sum; 0: GPUs among themselves.")] = 0,
    quality: Annotated[
        str,
        typer.Option(
            help="exact: no codec; safe: what keeps training within noise from its first step; fast: all that suits the optimizer."
        ),
    ] = "safe",
    optimizer: Annotated[str, typer.Option(help="adam or sgd: 1-bit and top-k cost quality under Adam-like ones.")] = "adam",
    codecs: Annotated[str | None, typer.Option(help="Codecs to look at, with commas in between.")] = None,
    goodput: Annotated[bool, typer.Option("--goodput", help="Say tokens (or images) a second, and what a million cost.")] = False,
    price_node: Annotated[float, typer.Option(help="With --goodput: of a machine with GPUs, an hour.")] = 0.0,
    price_server: Annotated[float, typer.Option(help="With --goodput: of a CPU server, an hour.")] = 0.0,
    price_link: Annotated[float, typer.Option(help="With --goodput: of a machine's link, an hour.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Which pays on this link: no compression, bf16, or a codec in every step?

    Beside it: what optimizers that exchange rarely (psgc.DiLoCo and its relatives), or next to nothing (psgc.DeMo), would take. They are never advised.

    Example: psgc advise --model llama-8b --gpu h100 --nodes 8 --link 100

    Example: psgc advise --model llama-8b --gpu h100 --nodes 8 --link 100 --goodput --price-node 30 --price-link 2
    """
    prices = {"--price-node": price_node, "--price-server": price_server, "--price-link": price_link}
    if not goodput:
        refuse_beside(context, ("price_node", "price_server", "price_link"), "only with --goodput")
    for flag, price in prices.items():
        if not 0 <= price <= MOST_PRICE:
            raise UsageError(f"advise: {flag} {price:g}: expected the price of an hour, 0 to {MOST_PRICE:g}")
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        raise UsageError(f"advise: --tokens {tokens}: expected at least 1, and {MOST_TOKENS} at most")
    with progress(as_json):
        from psgc.codecs.common.texts import split_texts
        from psgc.launch.gpu_results import with_measured_codecs
        from psgc.plan.inputs.estimates import cluster_of, located
        from psgc.plan.whatif import advise as advising

    from psgc.plan.model.level import LEVELS
    from psgc.plan.model.quality import ADAM, OPTIMIZERS, Standard

    if optimizer not in OPTIMIZERS:
        raise UsageError(f"advise: --optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    if quality not in LEVELS:
        raise UsageError(f"advise: --quality {quality!r}: choose one of {', '.join(LEVELS)}")
    given, device = located(_profile(model, profile, gpu, tokens, goodput=goodput), gpu)
    cluster = cluster_of(gpu or given.hardware, nodes, gpus_per_node, link, latency_us, servers, intra, cores, host)
    named = tuple(split_texts(codecs or ""))
    if memory is not None and not 0 < memory <= MOST_MEMORY_GBPS:
        raise UsageError(f"advise: --memory {memory:g}: expected GB/s above 0, and {MOST_MEMORY_GBPS:g} at most")
    found = advising.advise(
        given,
        cluster,
        gpu=gpu or "",
        memory_gbps=memory,
        standard=Standard(quality, optimizer == ADAM),
        codecs=named,
        measured=with_measured_codecs,
    )
    found["notes"] += [device] if device else []
    if goodput:
        _add_goodput(found, cluster, _items(model, tokens), (price_node, price_server, price_link))
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)


def _items(model: str | None, tokens: int | None) -> int:
    """The number of items (tokens or images) in one GPU's iteration."""
    from psgc.plan.inputs.architectures import architecture

    if tokens is None and model is None:
        raise UsageError("advise: --goodput with --profile needs --tokens: tokens (or images) a GPU and step")
    return tokens if tokens is not None else architecture(str(model)).batch


def _add_goodput(found: dict[str, Any], cluster: Any, items: int, prices: tuple[float, float, float]) -> None:
    from psgc.plan.whatif.goodput import Prices, goodput

    hour = Prices(*prices)
    for one in found["candidates"]:
        one["goodput"] = goodput(one["iteration_ms"] * 1e3, items, cluster, hour).to_json()
    found["notes"].append(
        f"goodput: {items:,} tokens (or images) on each of {cluster.gpus} GPUs an iteration, {hour.of(cluster):,.2f} an hour for all machines and links; "
        f"every token is assumed to be worth the same, which is wrong for a candidate that costs quality"
    )


def _profile(model: str | None, profile: str | None, gpu: str | None, tokens: int | None, *, goodput: bool) -> Any:
    from psgc.plan.inputs.profile import computed_profile, load_profile

    if (model is None) == (profile is None):
        raise UsageError("advise: give either --model or --profile")
    if profile is not None:
        if tokens is not None and not goodput:
            raise UsageError("advise: --tokens goes with --model; a profile's times are of its own batch")
        return load_profile(profile, gpu or "v100")
    if gpu is None:
        raise UsageError("advise: --gpu is missing: what --model's times are computed for")
    return computed_profile(str(model), gpu, tokens)


def _print(found: dict[str, Any]) -> None:
    rows = [
        [one["name"], *_times(one), _against_bf16(one), f"{one['ratio_bf16']:,.3g}x", _remark(one)]
        for one in found["candidates"]
    ]  # fmt: skip
    # Short headings, so that the table fits into 80 columns; the line below it says what they mean.
    print_table(["", "now", "not yet", "against bf16", "fewer bytes", ""], rows)
    print_text(
        "now: ms of an iteration that runs today; not yet: by a plan that this version cannot run; against bf16: the ratio of these times",
        "- ",
    )
    if "goodput" in found["candidates"][0]:
        print_table(
            ["", "tokens a second", "us a token", "price of a million"], [_goodput_row(one) for one in found["candidates"]], title="goodput"
        )
    for note in found["notes"]:
        print_text(note, "- ")
    print()
    print_text(f"{found['choice']}: {found['why']}")


def _times(one: dict[str, Any]) -> list[str]:
    """An iteration by a plan that runs today, and by a faster one that does not."""
    takes, later = f"{one['iteration_ms']:,.1f}", one["not_carried_yet_ms"]
    return [takes, "" if later is None else f"{later:,.1f}"] if one["carried"] else ["", takes]


def _goodput_row(one: dict[str, Any]) -> list[str]:
    million = one["goodput"]["price_per_million"]
    return [
        one["name"] if one["carried"] else f"{one['name']} (not in this version)",
        f"{one['goodput']['items_per_s']:,.0f}",
        _figure(one["goodput"]["us_per_item"]),
        "no prices given" if million is None else _figure(million),
    ]


def _figure(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _against_bf16(one: dict[str, Any]) -> str:
    """The ratio of its time to that of bf16, with its margin."""
    return f"{1 - one['gain_over_bf16']:.2f}x +-{one['margin_over_bf16']:.2f}"


def _remark(one: dict[str, Any]) -> str:
    remarks = (
        "best left unused" if one["kind"] == "compress" and not one["compressed_share"] else "",
        "costs quality" if one["sound"] is False else "",
        "another optimizer" if one["kind"] == "infrequent" else one["times"],
    )
    return ", ".join(remark for remark in remarks if remark)
