"""The verb ``psgc top``: a running job's figures, refreshed, or once."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from psgc.errors import JobFailed, PsgcError, UsageError
from psgc.launch.flags import Json

LEAST_INTERVAL_S = 0.2


def top(
    pid: Annotated[
        int | None,
        typer.Option(help="A job's launcher (psgc run) or another of its processes, on this machine; default: DMLC_PS_ROOT_URI etc."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, with means since the job began.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two tables.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Show a running job: each rank's steps, waiting, overlap, ratio and bytes, and each server's load. Ctrl-C ends it; the job goes on.

    Example: psgc top --pid 4711
    """
    if not interval >= LEAST_INTERVAL_S:
        raise UsageError(f"top: --interval {interval:g}: expected at least {LEAST_INTERVAL_S} seconds")
    from rich.console import Console
    from rich.live import Live

    from psgc.launch.observing.live_table import document, table
    from psgc.launch.observing.scheduler_view import SchedulerView, config_of
    from psgc.observe.live import Follower

    config = config_of(pid)
    with SchedulerView(config) as scheduler:
        follower = Follower()
        seen = follower.see(scheduler.ask())
        if as_json:
            print(json.dumps(document(seen)))
            return
        if once:
            Console().print(table(seen, config.silence_s))
            return
        try:
            with Live(table(seen, config.silence_s), auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(table(follower.see(scheduler.ask()), config.silence_s), refresh=True)
        except KeyboardInterrupt:
            return
        except JobFailed as error:
            print(f"the job has failed: {error}")
        except PsgcError:
            print("the scheduler does not answer any more: the job has ended")
