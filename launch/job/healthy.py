"""``python -m psgc.launch.job.healthy``: whether this container's part of a job answers, for an image's HEALTHCHECK; status 0 or 1.

A scheduler, and a server whose port is named, accept a connection. Whatever else runs here is healthy while it runs: psgc itself ends what hangs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

ANSWER_S: Final = 3.0
PORTS: Final = {"scheduler": "DMLC_PS_ROOT_PORT", "server": "DMLC_PORT"}


def unhealthy(env: Mapping[str, str]) -> str:
    """Why this container is not healthy; "" if it is."""
    for role in env.get("DMLC_ROLE", "").lower().replace("joint", "server,worker").split(","):
        port = env.get(PORTS.get(role.strip(), ""), "").strip()
        if not port:
            continue
        try:
            socket.create_connection(("localhost", int(port)), ANSWER_S).close()
        except (OSError, ValueError) as error:
            return f"the {role.strip()} does not answer at port {port}: {error}"
    return ""


def main() -> None:
    why = unhealthy(os.environ)
    if why:
        print(why)
    sys.exit(1 if why else 0)


if __name__ == "__main__":
    main()
