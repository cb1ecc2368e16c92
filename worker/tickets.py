"""Waiting without polling: a ticket becomes done once, and a thread sleeps on an eventfd until its tickets are done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable


class StepTicket:
    """One bucket's step under way. ``done`` turns true once and stays."""

    __slots__ = ("_board", "done")

    def __init__(self, board: TicketBoard) -> None:
        self._board = board
        self.done = False

    def finish(self) -> None:
        """Mark it done and wake the threads that wait for it."""
        self._board.finish(self)


class _Wakeup:
    """One thread's eventfd. It is closed with the thread, or with the board."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)


class _Waiter(threading.local):
    def __init__(self) -> None:
        self.wakeup = _Wakeup()


class TicketBoard:
    """All tickets of a session. ``fail`` releases every waiter; the session decides what they then raise.

    Invariant: a waiter is woken once, by who takes it out of ``_waiting``, so that it needs no lock when it wakes up: the waker may still hold that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, set[StepTicket]] = {}  # eventfd -> tickets its thread still waits for
        self._open: set[StepTicket] = set()
        self._failed = False
        self._local = _Waiter()

    def issue(self) -> StepTicket:
        """A new ticket; already done if the session has failed."""
        ticket = StepTicket(self)
        with self._lock:
            if self._failed:
                ticket.done = True
            else:
                self._open.add(ticket)
        return ticket

    def finish(self, ticket: StepTicket) -> None:
        with self._lock:
            ticket.done = True
            self._open.discard(ticket)
            for tickets in self._waiting.values():
                tickets.discard(ticket)
            self._wake([fd for fd, tickets in self._waiting.items() if not tickets])

    def _wake(self, waiters: list[int]) -> None:  # under the lock
        for fd in waiters:
            del self._waiting[fd]
            os.eventfd_write(fd, 1)

    def wait(self, tickets: Iterable[StepTicket]) -> None:
        """Sleep until all are done or the session has failed."""
        fd = self._local.wakeup.fd
        try:
            with self._lock:
                left = {ticket for ticket in tickets if not ticket.done}
                if not left or self._failed:
                    return
                self._waiting[fd] = left
            while True:
                try:
                    os.eventfd_read(fd)  # also where nothing is left by now: who found that is about to write
                except InterruptedError:  # a signal whose handler has raised nothing
                    continue
                if not left or self._failed:
                    return
        except BaseException:  # Ctrl-C
            with self._lock:
                self._waiting.pop(fd, None)
            raise

    def outstanding(self) -> list[StepTicket]:
        with self._lock:
            return list(self._open)

    def fail(self) -> None:
        """The session has failed: every ticket counts as done."""
        with self._lock:
            self._failed = True
            for ticket in self._open:
                ticket.done = True
            self._open.clear()
            self._wake(list(self._waiting))
