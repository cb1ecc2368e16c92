"""The table of transports for payloads. To add one, write its file and add its row.

It has names only, so that reading a setting loads no transport; ``selection.py`` loads a transport when it is used.
"""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"  # value of PSGC_TRANSPORT: the first transport that reaches the server
FALLBACK: Final = "tcp"  # every worker can use it, so every server listens on it

# Value of PSGC_TRANSPORT -> the module that has the transport, as TRANSPORT. The order is that of preference.
MODULES: Final[dict[str, str]] = {
    "shm": "psgc.transport.shm",
    "tcp": "psgc.transport.tcp",
}


def choices() -> tuple[str, ...]:
    """The values of PSGC_TRANSPORT."""
    return (AUTO, *sorted(MODULES))
