"""Waiting for tickets."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from psgc.worker.tickets import TicketBoard


def signal_its_waiter(board: TicketBoard) -> None:
    while not board._waiting:
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_with_a_handler_does_not_end_a_wait() -> None:
    """A data loader's SIGCHLD, or a batch system's SIGUSR1."""
    board, heard = TicketBoard(), threading.Event()
    ticket = board.issue()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())

    def interrupt() -> None:
        signal_its_waiter(board)
        heard.wait(100)
        board.finish(ticket)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        board.wait([ticket])
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert ticket.done and heard.is_set()


def test_what_a_handler_raises_ends_a_wait() -> None:
    board = TicketBoard()
    ticket = board.issue()

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, leave)
    thread = threading.Thread(target=signal_its_waiter, args=(board,))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            board.wait([ticket])
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert not ticket.done and not board._waiting
