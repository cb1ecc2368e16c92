"""Whose a job's processes are, and the keys that a part therefore has: one, or two in turn. Pure, but for ``refuse_races``.

A BytePS server (byteps 0.2.5) has one buffer for a key. The first push of round n + 1 overwrites the sum of round n, whoever has yet to pull it: that
worker gets another's gradient for a sum, and no error. So no worker may push round n + 1 of a key before every worker has pulled round n of it.

Where all workers are psgc's, a part on such a server has two keys, A and B, for rounds in turn, and each worker pulls a round before it pushes the
next. A worker pushes round n + 2 to A after it has pulled round n + 1 from B. That sum has every worker's push, and each worker had pulled round n from A
before its push to B: nobody still waits for what round n + 2 overwrites. No message is added. Tensors do not wait for each other, so ranks may submit
them in any order.

psgc's servers count rounds for each worker, and a part there has one key. Workers and servers of psgc say who they are by their nodes' endpoint names.
"""

from __future__ import annotations

import logging
from typing import Final

from psgc.errors import ConfigError
from psgc.pslite.byteps.commands import PartPlace
from psgc.pslite.nodes import SERVER_GROUP, WORKER_GROUP, rank_of
from psgc.pslite.postoffice import Postoffice

logger = logging.getLogger(__name__)

ENDPOINT_NAME: Final = b"psgc"  # of a worker that takes keys in turn, or of a server that counts rounds for each worker
SECOND_KEY: Final = 1 << 32  # what a part's second key is above its first: tensors and parts have 16 bits each


def stock_nodes(office: Postoffice, group: int) -> tuple[int, ...]:
    """The ids of the group's nodes that are not psgc's. The office has joined."""
    return tuple(node.id for node in office.listed(group) if node.endpoint_name != ENDPOINT_NAME)


def keys_of(place: PartPlace, two_key_servers: frozenset[int]) -> tuple[int, ...]:
    """A part's keys on the wire, which its rounds take in turn. two_key_servers: ranks."""
    return (place.wire_key, place.wire_key + SECOND_KEY) if place.server in two_key_servers else (place.wire_key,)


def two_key_servers(office: Postoffice) -> frozenset[int]:
    """The ranks of the servers on which parts have two keys: byteps's, unless byteps's workers, which have but one key, push to them, too."""
    if stock_nodes(office, WORKER_GROUP):
        return frozenset()
    return frozenset(map(rank_of, stock_nodes(office, SERVER_GROUP)))


def refuse_races(office: Postoffice) -> None:
    """Raise ConfigError for a job in which psgc's workers share byteps's servers with byteps's workers, unless the settings want it; and for one whose
    scheduler leaves out what nodes say of themselves, as that of an older psgc does."""
    workers, servers = stock_nodes(office, WORKER_GROUP), stock_nodes(office, SERVER_GROUP)
    if office.node_id in (*workers, *servers):
        raise ConfigError(
            f"the ps-lite scheduler at {office.settings.root_host}:{office.settings.root_port} does not pass on the endpoint names of nodes, by which psgc's "
            f"processes know each other; start byteps 0.2.5.post15's, or one of this version of psgc"
        )
    if not workers or not servers or len(workers) == office.num_workers:
        return
    what = (
        f"workers {_some(workers)} and servers {_some(servers)} of this ps-lite job are BytePS's: its servers mix the steps of its workers, and sums can "
        f"be wrong"
    )
    if not office.settings.racy:
        raise ConfigError(f"{what}; start psgc's servers, or psgc's workers only; PSGC_PSLITE_RACY=1 on all of psgc's processes allows it")
    logger.warning("PSGC_PSLITE_RACY=1: %s", what)


def _some(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:8])) + (" ..." if len(ids) > 8 else "")
