"""A server whose sums take 0.2 s longer. Run by tests."""

from __future__ import annotations

import sys
import time
from typing import Any

from psgc.launch.job.role import run_role
from psgc.server.engine import Engine

_run = Engine.run


def run(self: Engine, *args: Any) -> Any:
    time.sleep(0.2)
    return _run(self, *args)


if __name__ == "__main__":
    Engine.run = run  # type: ignore[method-assign]
    sys.exit(run_role("server"))
