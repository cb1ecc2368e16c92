"""The command line ``psgc``: the table of its verbs; flags in, exit status out.

Each verb imports what it needs when it is called, so that --help starts at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final, NoReturn

import typer

from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.usage import WRONG_USAGE, error_line, is_verb
from psgc.launch.verbs import (
    advise,
    bench_kernels,
    bench_pushpull,
    chaos,
    codecs,
    collect,
    doctor,
    k8s_render,
    options,
    plan,
    profile,
    run,
    simulate,
    slurm,
    syncer,
    top,
    trace_merge,
    trace_show,
    verify,
    warm,
    whatif,
)
from psgc.launch.version import version_line


@dataclass(frozen=True, slots=True)
class Verb:
    """One row of the table. name: as it is typed, with its group. function: typer reads flags and help from it. ends_with_command: whatever
    follows the verb's own flags is the user's command, with its flags."""

    name: str
    function: Callable[..., None]
    ends_with_command: bool = False


VERBS: Final = (  # in the order of the help
    Verb("run", run.run, ends_with_command=True),
    Verb("slurm", slurm.slurm, ends_with_command=True),
    Verb("k8s render", k8s_render.render, ends_with_command=True),
    Verb("syncer", syncer.syncer),
    Verb("doctor", doctor.doctor),
    Verb("collect", collect.collect),
    Verb("codecs", codecs.codecs),
    Verb("warm", warm.warm),
    Verb("bench kernels", bench_kernels.kernels),
    Verb("bench pushpull", bench_pushpull.pushpull),
    Verb("options", options.options),
    Verb("plan", plan.plan),
    Verb("simulate", simulate.simulate),
    Verb("verify", verify.verify),
    Verb("chaos", chaos.chaos, ends_with_command=True),
    Verb("advise", advise.advise),
    Verb("whatif", whatif.whatif),
    Verb("profile", profile.profile, ends_with_command=True),
    Verb("top", top.top),
    Verb("trace merge", trace_merge.merge),
    Verb("trace show", trace_show.show),
)
GROUPS: Final = {
    "k8s": "Jobs on Kubernetes.\n\nExample: psgc k8s render --name digits --image registry/digits -- python train.py",
    "bench": "Measure this machine.\n\nExample: psgc bench kernels --json",
    "trace": "Timelines of a job that ran with PSGC_TRACE=folder.\n\nExample: psgc trace show trace",
}


def _app() -> typer.Typer:
    """The table, as typer has it."""
    app = typer.Typer(
        name="psgc", no_args_is_help=True, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        help="Communication for data-parallel training on networks that are too slow for it.\n\n"
        "Example: psgc run --workers 2 --servers 1 --codec int8 -- python train.py",
    )  # fmt: skip
    app.callback()(_root)
    groups = {"": app}
    for name, text in GROUPS.items():
        groups[name] = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help=text)
        app.add_typer(groups[name], name=name)
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        settings = {"allow_interspersed_args": False} if verb.ends_with_command else None
        groups[group].command(name, context_settings=settings)(verb.function)
    return app


def _root(version: Annotated[bool, typer.Option("--version", help="Print version and interpreter, and exit.")] = False) -> None:
    if version:
        print(version_line())
        raise typer.Exit


app: Final = _app()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """A verb that is ended by SIGTERM ends the job that it has started, as by Ctrl-C; by default it would leave it behind."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Entry point of ``psgc``. A user's mistake is one line on stderr and status 2, a failed job status 1. What ends it ends what it has started."""
    program = typer.main.get_command(app)
    try:
        with _sigterm_unwinds():
            sys.exit(program(prog_name="psgc", standalone_mode=False))
    except WRONG_USAGE as error:
        print(error_line(error, program, sys.argv[1:]), file=sys.stderr)
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
