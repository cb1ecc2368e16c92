"""The command line ``psgc``: flags in, exit status out. Each verb imports what it needs, so that --help starts at once."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer

from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.compile_on_call import compiles_on_call
from psgc.launch.tables import print_table, progress
from psgc.launch.usage import WRONG_USAGE, is_verb, refuse_beside, told
from psgc.launch.verbs import advise as advise_cli
from psgc.launch.verbs import options as plan_cli
from psgc.launch.verbs import plan as planning
from psgc.launch.verbs import profile as profile_cli
from psgc.launch.verbs import whatif as whatif_cli
from psgc.launch.version import version_line

app = typer.Typer(
    name="psgc", no_args_is_help=True, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Communication for data-parallel training on networks that are too slow for it.\n\n"
    "Example: psgc run --workers 2 --servers 1 --codec int8 -- python train.py",
)  # fmt: skip
bench = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure this machine.\n\nExample: psgc bench kernels --json")
app.add_typer(bench, name="bench")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", help="Print version and interpreter, and exit.")] = False) -> None:
    if version:
        print(version_line())
        raise typer.Exit


def main() -> None:
    """Entry point of ``psgc``. A user's mistake is one line on stderr and status 2, a failed job status 1."""
    program = typer.main.get_command(app)
    try:
        sys.exit(program(prog_name="psgc", standalone_mode=False))
    except WRONG_USAGE as error:
        print(told(error, program, sys.argv[1:]), file=sys.stderr)
        sys.exit(2)
    except typer.Abort:  # how some versions of click tell of Ctrl-C
        sys.exit(130)
    except (UsageError, ConfigError, CodecError) as error:
        _refuse(error, 2)
    except PsgcError as error:
        _refuse(error, 1)


def _refuse(error: PsgcError, status: int) -> NoReturn:
    verb, colon, _ = str(error).partition(": ")
    print(f"psgc{' ' if colon and is_verb(typer.main.get_command(app), verb) else ': '}{error}", file=sys.stderr)
    sys.exit(status)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs.", show_default=False)] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes.")] = 1,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that the workers pretend to be spread over. Default: 1; with --link-mbit one for each worker.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of DistributedOptimizer, e.g. int8 or onebit/int8.")] = None,
    plan: Annotated[str | None, typer.Option(help="File of the plan that gradients travel by, in place of --codec.")] = None,
    layout_out: Annotated[str | None, typer.Option(help="Write the layout that was used to this file, as a plan.")] = None,
    link_mbit: Annotated[
        float | None,
        typer.Option(
            help="Give each node and each server a simulated link of so many 1e6 bit/s, each way: psgc's payloads are paced and go by TCP. "
            "Not paced: torch.distributed's collectives, and psgc's control messages."
        ),
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Prefix each line with its process.")] = True,
) -> None:
    """Run a whole job on this machine: scheduler, servers, and CMD once a worker.

    Example: psgc run --workers 4 --codec onebit -- python train.py
    """
    from psgc.launch.job.run import run_job

    sys.exit(
        run_job(
            command or [], workers=workers, servers=servers, nodes=nodes, codec=codec, plan=plan, layout_out=layout_out, link_mbit=link_mbit,
            prefix=prefix,
        )
    )  # fmt: skip


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check that psgc can run here, and say how to mend what is wrong.

    Example: psgc doctor --json
    """
    from psgc.launch.verbs.doctor import examine

    with progress(as_json):
        report = examine()
    if as_json:
        print(json.dumps(report))
    else:
        rows = [
            ["ok" if c["ok"] else "WRONG", c["name"], c["found"], c["wanted"], "" if c["ok"] else c["remedy"]] for c in report["checks"]
        ]
        print_table(["", "check", "found", "wanted", "remedy"], rows)
    sys.exit(0 if report["ok"] else 1)


@app.command()
@compiles_on_call
def codecs(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as they stand in docs/codecs.md.")] = False,
) -> None:
    """List the codecs, their parameters, what they save, what they lose, and when to use which.

    Example: psgc codecs
    """
    if as_json and markdown:
        raise UsageError("codecs: --json and --markdown are two ways to print them; give one")
    from psgc.codecs.catalogue import catalogue
    from psgc.launch.pages.codecs import advice_table, codec_table, render_codecs

    with progress(as_json):
        entries = catalogue()
    if as_json:
        print(json.dumps(entries))
    elif markdown:
        print(render_codecs(entries))
    else:
        print_table(*codec_table(entries))
        print_table(*advice_table(entries))


@app.command()
def warm(
    codec: Annotated[list[str] | None, typer.Option(help="Codec; give it several times for several. Default: everything.")] = None,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of their first use, for this machine's processor.

    Example: psgc warm --codec int8
    """
    from psgc.launch.job.warming import ALWAYS, everything
    from psgc.launch.job.warming import warm as warm_kernels

    done = warm_kernels([ALWAYS, *codec] if codec else everything(), quiet=as_json)
    if as_json:
        print(json.dumps(done))
    else:
        compiled = sum(one["compiled"] for one in done)
        seconds = sum(one["seconds"] for one in done)
        print(
            f"{compiled} kernels compiled in {seconds:.0f} s"
            if compiled
            else f"all kernels of {len(done)} codec{'s' * (len(done) > 1)} were compiled before"
        )


@bench.command()
def kernels(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(help="Elements, one size after the other.")] = "64K,1M,16M",
    numel: Annotated[int | None, typer.Option(help="Elements: one size, in place of --sizes.")] = None,
    codec: Annotated[list[str] | None, typer.Option(help="Codec; give it several times for several. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    baselines: Annotated[bool, typer.Option(help="Time the same in NumPy, torch and torch.compile beside it.")] = True,
    as_json: Json = False,
) -> None:
    """Time every codec's encode, decode and server kernels against memcpy; wrong kernels are not timed.

    Example: psgc bench kernels --sizes 64K,1M --codec onebit
    """
    if numel is not None:
        refuse_beside(context, ("sizes",), f"--numel {numel} is the one size; give one of them")
    with progress(as_json):
        from psgc.codecs import registered_codecs, registered_schemes
        from psgc.launch.bench.baselines import IMPLEMENTATIONS
        from psgc.launch.bench.kernels import bench_kernels, read_sizes, timed_subject
        from psgc.launch.bench.tables import bytes_text, ratio_table, time_table

    elements = read_sizes(sizes) if numel is None else [numel]
    chosen = [timed_subject(text).canonical for text in codec or (*registered_codecs(), *registered_schemes())]
    try:
        with progress(as_json) as tell:
            result = bench_kernels(elements, chosen, device, tell, IMPLEMENTATIONS if baselines else ())
    except CodecError as error:  # the codecs exist: a kernel is wrong
        raise PsgcError(str(error)) from None
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; memcpy of {bytes_text(4 * max(elements))}: {result['memcpy_gbps']:.2f} GB/s. One thread.")
    print_table(*ratio_table(result), title=f"times memcpy's speed, {bytes_text(4 * max(elements))} of fp32")
    print_table(*time_table(result), title="nanoseconds an element")
    for implementation, why in result["left_out"].items():
        print(f"without {implementation}: {why}")


@bench.command()
def pushpull(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes.")] = 1,
    nbytes: Annotated[int, typer.Option("--bytes", help="Bytes of fp32.")] = 25_000_000,
    codec: Annotated[str, typer.Option(help="Codec.")] = "none",
    transport: Annotated[str, typer.Option(help="auto, tcp or shm.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds timed.")] = 20,
    as_json: Json = False,
) -> None:
    """Time push_pull between real processes on this machine, gloo's all-reduce beside it; the sums are checked first.

    Example: psgc bench pushpull --workers 2 --servers 1 --bytes 25000000 --transport tcp
    """
    from psgc.codecs import parse_scheme
    from psgc.launch.bench.pushpull import bench_pushpull

    codec = parse_scheme(codec).canonical
    if transport not in ("auto", "tcp", "shm"):
        raise UsageError(f"bench pushpull: --transport {transport}: expected auto, tcp or shm")
    if min(workers, servers, rounds) < 1:
        raise UsageError(f"bench pushpull: --workers {workers} --servers {servers} --rounds {rounds}: each must be at least 1")
    with progress(as_json) as tell:
        tell(f"{rounds} rounds of {nbytes} bytes, {workers} workers, {servers} servers")
        result = bench_pushpull(workers, servers, nbytes, codec, transport, rounds)
    if as_json:
        print(json.dumps(result))
    else:
        print_table(["", ""], [[key, f"{value:.2f}" if isinstance(value, float) else str(value)] for key, value in result.items()])


# The help lists verbs in this order.
plan_cli.register(app)
planning.register(app)
advise_cli.register(app)
whatif_cli.register(app)
profile_cli.register(app)
