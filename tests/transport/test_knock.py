"""Why a connection cannot be made is known without waiting for one."""

from __future__ import annotations

import errno
import socket

from psgc.processes.addresses import listening_socket
from psgc.transport.control.knock import AGAIN_S, PATIENCE_S, Knock


def settled(knock: Knock) -> int | None:
    """Its answer once an attempt has ended; as many looks as it takes, in a time of its own."""
    now = 0.0
    while (answer := knock.answer(now)) is None:
        now += 1e-4
    knock.close()
    return answer


def test_who_listens_and_who_does_not_are_told_apart() -> None:
    with listening_socket(host="127.0.0.1") as listener:
        port = listener.getsockname()[1]
        assert settled(Knock("127.0.0.1", port)) == 0
    assert settled(Knock("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_name_that_cannot_be_looked_up_is_said() -> None:
    assert Knock("no.such.host.invalid", 9).answer(0.0) == errno.EADDRNOTAVAIL


def test_where_nothing_comes_back_the_wait_is_bounded() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]  # fill the queue of those that nobody accepts: further ones get no answer
        for each in held:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        knock = Knock(*full.getsockname())
        assert knock.answer(0.0) is None
        assert knock.answer(PATIENCE_S - 0.1) is None
        assert knock.answer(PATIENCE_S + 0.1) == errno.ETIMEDOUT
        assert knock.answer(PATIENCE_S + AGAIN_S / 2) == errno.ETIMEDOUT, "until another attempt has ended"
        knock.close()
        for each in held:
            each.close()
