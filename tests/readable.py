"""Whether there is something to read: select() refuses descriptors from 1024 on, which a process that has run many tests may have."""

from __future__ import annotations

import select
from typing import Any


def readable(thing: Any, within_s: float) -> bool:
    """thing: has ``fileno()``."""
    poller = select.poll()
    poller.register(thing, select.POLLIN)
    return bool(poller.poll(1000 * within_s))
