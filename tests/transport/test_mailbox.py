"""Calls come in order, and whoever puts them faster than they are made does not keep the owner from anything else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from psgc.processes.mailbox import Mailbox
from tests.readable import readable


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


def ready(mailbox: Mailbox) -> bool:
    return readable(mailbox, 0.0)


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


def test_a_call_that_comes_while_the_owner_wakes_up_does_not_keep_later_ones_from_waking_it(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    read = os.eventfd_read

    def read_after_another_call(fd: int) -> int:
        mailbox.put(made.append, 1)
        return read(fd)

    mailbox.put(made.append, 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_read", read_after_another_call)
        for call, args in mailbox.drain(60):
            call(*args)
    assert made == [0, 1]
    mailbox.put(made.append, 2)
    assert ready(mailbox)


def test_calls_of_several_threads_all_come(mailbox: Mailbox) -> None:
    made: list[int] = []
    threads = [threading.Thread(target=lambda: [mailbox.put(made.append, number) for number in range(2000)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(made) < 6000:
        assert readable(mailbox, 60.0), "a call waits, and nothing wakes the owner"
        for call, args in mailbox.drain(60):
            call(*args)
    for thread in threads:
        thread.join()
