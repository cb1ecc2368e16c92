"""Which standby process each server gets: one in another place, so that no loss of a place takes both. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def elsewhere(servers: Sequence[str], standbys: Sequence[str]) -> list[int] | None:
    """The number of each server's standby, each once. servers, standbys: the place of each, as many of both. None where it cannot be done: half of them at most
    may be in one place. With both sorted by places, a shift by the largest place's number leads out of every place."""
    of_servers = sorted(range(len(servers)), key=lambda number: (servers[number], number))
    of_standbys = sorted(range(len(standbys)), key=lambda number: (standbys[number], number))
    shift = max(Counter(servers).values(), default=0)
    found = [0] * len(servers)
    for position, server in enumerate(of_servers):
        found[server] = of_standbys[(position + shift) % len(of_standbys)]
    return found if all(servers[server] != standbys[standby] for server, standby in enumerate(found)) else None
