"""Ids of nodes, groups of nodes, and the ranges of keys that servers hold: ps-lite's arithmetic, pure."""

from __future__ import annotations

import re
from typing import Final

from psgc.errors import RemoteProtocolError
from psgc.pslite.meta import EMPTY, SCHEDULER, SERVER, WORKER

SCHEDULER_ID: Final = 1
# Groups are sums of these.
SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP = 1, 2, 4
ALL: Final = SCHEDULER_GROUP + SERVER_GROUP + WORKER_GROUP
MAX_KEY: Final = (1 << 64) - 1


def server_id(rank: int) -> int:
    return 8 + 2 * rank


def worker_id(rank: int) -> int:
    return 9 + 2 * rank


def rank_of(node_id: int) -> int:
    """A node's rank within its role; 0 for the scheduler."""
    return max((node_id - 8) // 2, 0)


def role_of(node_id: int) -> int:
    if node_id < 8:
        return SCHEDULER
    return WORKER if node_id % 2 else SERVER


def group_ids(group: int, workers: int, servers: int) -> tuple[int, ...]:
    """The ids of a group's nodes; of a node's id itself that one. Raises RemoteProtocolError for a group that does not exist."""
    ids: list[int] = []
    if group & WORKER_GROUP:
        ids += map(worker_id, range(workers))
    if group & SERVER_GROUP:
        ids += map(server_id, range(servers))
    if group & SCHEDULER_GROUP:
        ids.append(SCHEDULER_ID)
    if not 1 <= group <= ALL:
        raise RemoteProtocolError(
            f"group {group} does not exist in ps-lite; groups are 1 to {ALL}: the sum of 1 (scheduler), 2 (servers), 4 (workers)"
        )
    return tuple(ids)


def key_ranges(servers: int) -> tuple[range, ...]:
    """The keys of each server."""
    size = MAX_KEY // servers
    return tuple(range(size * rank, size * (rank + 1)) for rank in range(servers))


def identity(node_id: int) -> bytes:
    """The routing id of a node's DEALER."""
    return b"ps%d" % node_id


def sender_of(identity_frame: bytes) -> int:
    """The id of the node that a routing id names; EMPTY for any other text, as a node has before it joins."""
    found = re.fullmatch(rb"ps(\d{1,9})", identity_frame)
    return int(found[1]) if found else EMPTY
