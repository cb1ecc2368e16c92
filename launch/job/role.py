"""``python -m psgc.launch.job.role scheduler|server``: the process of a scheduler or a server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.errors import ConfigError, PsgcError
from psgc.launch.job.logs import set_up_logging
from psgc.processes.descriptors import raise_limit

logger = logging.getLogger(__name__)


def run_role(role: str, env: Mapping[str, str] | None = None) -> int:
    """Serve as ``role`` until the job ends, and return the exit status. env: in place of this process's. A user's mistake is one line on stderr."""
    try:
        config = Config.from_env(env, role=role)
        set_up_logging(config.log_level)
        raise_limit()
        if not config.launcher:  # else it has told of them, once for all
            for note in config.notes:
                logger.warning("%s", note)
        logger.info("start %s", config)
        if config.wire == "pslite":
            from psgc.pslite.byteps.server import serve as serve_pslite

            return serve_pslite(config)
        if role == "scheduler":
            from psgc.scheduler.loop import serve
        else:
            from psgc.server.loop import serve
        status = serve(config)
        while config.serves_again and not status:
            Launcher(config.launcher).tell("left")
            status = serve(config, again=True)
        return status
    except PsgcError as error:
        print(f"psgc {role}: {str(error).removeprefix(f'{role}: ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ("scheduler", "server"):
        sys.exit("usage: python -m psgc.launch.job.role scheduler|server")
    sys.exit(run_role(sys.argv[1]))


if __name__ == "__main__":
    main()
