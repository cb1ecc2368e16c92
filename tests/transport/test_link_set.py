"""Whose turn it is: connections that there was no time for come first at the next turn, and nobody is forgotten."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from psgc.transport.link_set import LinkSet


class Chatty:
    """A connection on which there is always more than is received in a turn."""

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair()
        self.other.send(b"x")
        self.closed, self.queued, self.more, self.heard = False, False, True, 0
        self.held_in = self.held_out = False

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()
        self.other.close()


@pytest.fixture
def links() -> Iterator[LinkSet]:
    links = LinkSet()
    yield links
    for link in links:
        links.discard(link)
        link.close()
    links.close()


def turn(links: LinkSet, most: int) -> list[Any]:
    """What a loop does that has time for so many; those that it heard."""
    ready = links.ready()
    for link in ready[:most]:
        link.heard += 1  # type: ignore[attr-defined]
        links.received(link)
    links.defer(ready[most:])
    return ready[:most]


def test_everyone_has_a_turn_before_anyone_has_another(links: LinkSet) -> None:
    chatty: list[Any] = [Chatty() for _ in range(7)]
    for link in chatty:
        links.add(link)
    for turns in range(1, 15):
        turn(links, most=2)
        counts = sorted(link.heard for link in chatty)
        assert sum(counts) == 2 * turns
        assert counts[-1] - counts[0] <= 1
        assert links.pending, "the loop does not sleep on what it has put off"


def test_one_that_is_gone_meanwhile_is_not_waited_for(links: LinkSet) -> None:
    chatty: list[Any] = [Chatty() for _ in range(3)]
    for link in chatty:
        links.add(link)
    first = turn(links, most=1)
    gone = next(link for link in chatty if link not in first)
    links.discard(gone)
    gone.close()
    assert gone not in turn(links, most=3)
