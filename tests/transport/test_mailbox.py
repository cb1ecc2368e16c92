"""Calls come in order, and whoever puts them faster than they are made does not keep the owner from anything else."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator

import pytest

from psgc.processes.mailbox import Mailbox


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def ready(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_calls_are_made_in_order_and_then_nothing_wakes(mailbox: Mailbox) -> None:
    made: list[int] = []
    for number in range(3):
        mailbox.put(made.append, number)
    assert ready(mailbox)
    for call, args in mailbox.drain(60):
        call(*args)
    assert (made, ready(mailbox)) == ([0, 1, 2], False)


def test_a_call_that_puts_another_does_not_hold_the_owner_and_loses_nothing(mailbox: Mailbox) -> None:
    made: list[int] = []

    def again(number: int) -> None:
        made.append(number)
        put(number + 1)

    put: Callable[[int], None] = lambda number: mailbox.put(again, number)  # noqa: E731
    put(0)
    for turn in range(3):
        for call, args in mailbox.drain(0.0):
            call(*args)
        assert len(made) == turn + 1
        assert ready(mailbox), "the next poll returns at once"
    assert made == [0, 1, 2]
