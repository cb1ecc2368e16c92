"""Every interleaving of two workers and two servers whose processes die: the sums are right, nobody waits for ever. And: a broken rule is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from model import Deaths, WrongError, explore

from psgc.server.state import ServerState
from psgc.server.step import Commit, Kept, KeyState
from psgc.worker.client import Client


def test_without_deaths_what_is_left_out_for_being_the_same_changes_nothing() -> None:
    everything, enough = explore(Deaths(), reduce=False), explore(Deaths())
    assert (everything.ends, enough.ends) == (1, 1)
    assert 5 * enough.states < everything.states
    assert everything.names.keys() == enough.names.keys() == {"submit", "hear", "fold", "answer"}


@pytest.mark.timeout(600)
def test_a_server_may_die_at_any_moment() -> None:
    found = explore(Deaths((1, 0)))
    assert found.names["server dies"] and found.names["connect"] and found.names["notice"]


LARGE = pytest.mark.long  # a quarter of a million states and more


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("deaths", "states"),
    [
        (Deaths(workers=1), 19_923),
        pytest.param(Deaths(workers=2), 266_826, marks=LARGE),
        (Deaths((2, 0)), 117_251),
        pytest.param(Deaths(workers=1, returns=1), 280_415, marks=LARGE),
        pytest.param(Deaths((1, 1)), 909_814, marks=LARGE),
        pytest.param(Deaths((1, 0), workers=1), 1_013_822, marks=LARGE),
    ],
)
def test_two_processes_may_die_at_any_moment(deaths: Deaths, states: int) -> None:
    """states: as many as docs/protocol.md says."""
    assert explore(deaths).states == states


def _forgets(change: Callable[[Kept], Kept]) -> Any:
    take_up = KeyState.take_up
    return patch.object(KeyState, "take_up", lambda self, kept: take_up(self, change(kept)))


def _commits_late() -> Any:
    commit = KeyState._commit
    return patch.object(KeyState, "_commit", lambda self, result: sorted(commit(self, result), key=lambda each: isinstance(each, Commit)))


def _lets_in_again() -> Any:
    greeted = ServerState._greeted
    newest = lambda self, rank, hello: hello._replace(step=max(hello.step, self.incarnations.get(rank, 0)))  # noqa: E731
    return patch.object(
        ServerState, "_greeted", lambda self, peer, rank, hello, now: greeted(self, peer, rank, newest(self, rank, hello), now)
    )


def _lets_in_at_once() -> Any:
    """As the rank's, before it has said whose it is."""
    return patch.object(ServerState, "proved", lambda self, peer, rank: self.joined(peer, rank) or [])


BROKEN = {
    "what was committed is forgotten": (Deaths((1, 0)), lambda: _forgets(lambda _: Kept(None))),
    "the kept result is not taken up": (Deaths((1, 0)), lambda: _forgets(lambda kept: kept._replace(result=None))),
    "a result is sent before it is committed": (Deaths((1, 0)), _commits_late),
    "workers do not send again what was lost": (Deaths((1, 0)), lambda: patch.object(Client, "_error", lambda *_: [])),
    "nobody asks after what is unanswered": (Deaths((1, 0)), lambda: patch.object(Client, "_unanswered", lambda *_: iter(()))),
    "a follower's state is older than what its servers know of": (Deaths(workers=1), lambda: patch.object(KeyState, "replaced", lambda *_: None)),
    "a follower goes on before every server knows of it": (Deaths(workers=1), lambda: patch.object(Client, "greeted", True)),
    "a process whose place was taken is let in again": (Deaths(workers=1, returns=1), _lets_in_again),
    "a connection counts before it has said whose process it is of": (Deaths(workers=1, returns=1), _lets_in_at_once),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule: str) -> None:
    deaths, mutation = BROKEN[rule]
    with mutation(), pytest.raises(WrongError):
        explore(deaths)
