"""``python -m psgc.launch.job.role scheduler|server``: the process of a scheduler or a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

from psgc.config import Config
from psgc.diagnostics.lines import log_everything
from psgc.diagnostics.report import Launcher
from psgc.errors import ConfigError, PsgcError
from psgc.launch.job.batch_signals import ignore_scripts, obey_the_launcher_alone
from psgc.processes.descriptors import raise_limit

logger = logging.getLogger(__name__)
STATION_S: Final = 5.0  # it ends at once when its stdin does
STATION: Final = "psgc.launch.observing.station"  # by name: it is made of what observes jobs


def run_role(role: str, env: Mapping[str, str] | None = None) -> int:
    """Serve as ``role`` until the job ends, and return the exit status. env: in place of this process's. A user's mistake is one line on stderr."""
    try:
        config = Config.from_env(env, role=role)
        log_everything(config)
        raise_limit()
        if not config.launcher:  # else it has told of them, once for all
            for note in config.notes:
                logger.warning("%s", note)
        logger.info("start %s", config)
        if config.wire == "pslite":
            from psgc.pslite.byteps.server import serve as serve_pslite

            return serve_pslite(config)
        serve: Callable[..., int]
        if role == "scheduler":
            from psgc.scheduler.loop import serve
        else:
            from psgc.server.loop import serve as serve_as
            from psgc.server.succession import Succession

            serve = partial(serve_as, succession=Succession(config))
        with beside(config, env):
            return _serve(serve, config)
    except PsgcError as error:
        print(f"psgc {role}: {str(error).removeprefix(f'{role}: ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _serve(serve: Callable[..., int], config: Config) -> int:
    status = serve(config)
    while config.serves_again and not status:
        Launcher(config.launcher).tell("left")
        status = serve(config, again=True)
    return status


@contextmanager
def beside(config: Config, env: Mapping[str, str] | None) -> Iterator[None]:
    """A scheduler whose job is to be looked at has a process beside it for that; it ends when the block does, or this process."""
    if config.role != "scheduler" or not (config.status_port or config.metrics_port):
        yield
        return
    if config.wire != "psgc":
        logger.warning("a scheduler of PSGC_WIRE=%s has neither a status page nor metrics", config.wire)
        yield
        return
    try:
        # In a session of its own: a terminal's Ctrl-C is the scheduler's to obey.
        station = subprocess.Popen([sys.executable, "-m", STATION], stdin=subprocess.PIPE, env=env, start_new_session=True)
    except OSError as error:
        logger.warning("there is no status page, and the scheduler has no metrics: no process can be started for them: %s", error)
        yield
        return
    try:
        yield
    finally:
        assert station.stdin is not None
        station.stdin.close()
        try:
            station.wait(STATION_S)
        except subprocess.TimeoutExpired:  # it is stopped
            station.kill()
            station.wait()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ("scheduler", "server"):
        sys.exit("usage: python -m psgc.launch.job.role scheduler|server")
    ignore_scripts()
    obey_the_launcher_alone(os.environ)
    sys.exit(run_role(sys.argv[1]))


if __name__ == "__main__":
    main()
