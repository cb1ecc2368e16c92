"""The transports that payloads may travel by: one row each. To add one, write its file and add its row.

Names alone, so that reading a setting loads no socket: ``selection.py`` loads a transport when it is used.
"""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"  # PSGC_TRANSPORT: the first that reaches the server
FALLBACK: Final = "tcp"  # every worker can use it, so every server listens on it

# Value of PSGC_TRANSPORT -> the module that has the transport, as TRANSPORT. The order is that of preference.
MODULES: Final[dict[str, str]] = {
    "shm": "psgc.transport.shm",
    "tcp": "psgc.transport.tcp",
}


def choices() -> tuple[str, ...]:
    """What PSGC_TRANSPORT may say."""
    return (AUTO, *sorted(MODULES))
