"""The verb ``psgc chaos``: a job whose members are killed, stopped, cut off and slowed while it runs."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, TypeVar

import typer

from psgc.errors import PsgcError, UsageError
from psgc.launch.flags import Json

Number = TypeVar("Number", int, float)


def chaos(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="The job: psgc run ... -- CMD.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of the schedule: the same seed does the same to a job of the same members.")] = 0,
    events: Annotated[int, typer.Option(help="How many; the job should last longer than they take.")] = 20,
    roles: Annotated[str, typer.Option(help="Whose members: server,scheduler,worker.")] = "server,scheduler",
    kinds: Annotated[str, typer.Option(help="What happens to them: kill,stop,cut,slow.")] = "kill,stop,cut,slow",
    every: Annotated[float, typer.Option(help="Mean pause between two events, in seconds, from when the job goes on.")] = 1.0,
    limit: Annotated[float, typer.Option(help="A job that does not go on for so many seconds is given up.")] = 120.0,
    progress: Annotated[str, typer.Option(help="Regular expression of lines that workers print while they go on.")] = r"\bstep\b",
    result: Annotated[
        str, typer.Option(help="Regular expression of the lines by which the disturbed run is compared with an undisturbed one.")
    ] = r"(digest|loss(es)?|found|weights)\b.*",
    schedule: Annotated[bool, typer.Option("--schedule", help="Print the schedule and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a job twice, undisturbed and with events by a seeded schedule, and check what its policies promise.

    A job that goes on by its policies must print the same results, bit for bit (under PSGC_ON_WORKER_LOSS=shrink the same on
    all ranks), and end with status 0; one that ends by them must say why in its last line,
    unless PSGC_RESTARTS has started it again.
    Nothing may be left in either case. Prints how long the job took to go on after each event, as a histogram. Status 1: a promise was broken,
    or no event happened.

    Example: psgc chaos --seed 7 --events 200 -- psgc run --workers 2 -- python train.py
    """
    from psgc.launch.chaos.checking import check, described
    from psgc.launch.chaos.schedule import kinds_of, roles_of
    from psgc.launch.chaos.schedule import schedule as schedule_of

    chosen = schedule_of(seed, _positive("events", events), roles_of(roles), kinds_of(kinds), _positive("every", every))
    if schedule:
        for event in chosen:
            print(described(event))
        return
    if not command:
        raise UsageError("chaos: no job given; for example: psgc chaos --seed 7 -- psgc run --workers 2 -- python train.py")
    report = check(
        command, chosen, seed, _pattern("progress", progress), _pattern("result", result), _positive("limit", limit),
        say=lambda text: print(f"psgc chaos: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    if report.broken:
        raise PsgcError(f"chaos: seed {seed}: {report.broken[0]}")
    if report.untried:
        raise PsgcError(f"chaos: seed {seed}: {report.untried}: have the job take more steps, or name other --roles and --kinds")


def _positive(flag: str, value: Number) -> Number:
    if value <= 0:
        raise UsageError(f"chaos: --{flag} {value:g}: expected more than 0")
    return value


def _pattern(flag: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"chaos: --{flag} {text}: no regular expression: {error}") from None
