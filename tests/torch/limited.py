"""A group whose members have met gets a lower limit of a step: until then each may be as slow as the machine makes it."""

from __future__ import annotations

from typing import Any

from psgc.worker.collectives.mesh import Mesh


def limit_step(group: Any, seconds: float) -> None:
    """Lower the limit on the other members, which is that of the session's settings so far."""
    peers, set_s = group._peers, group._session.config.step_timeout_s
    if isinstance(peers, Mesh):
        assert peers._timeout_s == set_s
        peers._timeout_s = seconds
        for peer in peers._peers.values():
            assert peer.socket.gettimeout() == set_s
            peer.socket.settimeout(seconds)
    else:
        assert peers.timeout_s == set_s
        peers.timeout_s = seconds
