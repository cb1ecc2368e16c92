"""What all workers that one torchrun agent has started would say in the same words is said by one of them: the first to claim it in the agent's store, which
outlives them. Where there is no such store, or it does not answer, everybody says it: twice is better than never."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Final

from psgc.config import Agent, agent

ANSWER_S: Final = 2.0


def first_to_say(text: str) -> bool:
    """Whether this process is the one that says it."""
    found = agent()
    return found is None or claimed(_store, found, text)


def claimed(connect: Any, found: Agent, text: str) -> bool:
    """Whether nobody on this node has claimed the text in this attempt. connect: gives a client of an agent's store."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        return bool(connect(found).add(f"psgc/said/{found.attempt}/{found.node}/{digest}", 1) == 1)
    except (RuntimeError, ValueError, ImportError):
        return True


def _store(found: Agent) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(found.host, found.port, is_master=False, timeout=timedelta(seconds=ANSWER_S), wait_for_workers=False)
