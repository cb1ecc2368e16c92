"""A server that hears the next job's scheduler, since its own has ended, and the BYE of that was lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psgc.server.loop import Server
from psgc.server.state import ServerState
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, encode_body


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_server_that_all_workers_have_left_ends_in_order_where_a_scheduler_does_not_know_it(left: int) -> None:
    state, said, ended = ServerState(0, 2, 7, 1), [], []
    for rank in range(left):
        state.left(rank, 0.0)
    server = SimpleNamespace(_state=state, _tell_scheduler=said.append, _end=lambda *why: ended.append(why))
    refusal = encode_body(Notice(ErrorCode.NOT_ADMITTED, "scheduler: register first"))
    Server._handle(server, Header(Kind.ERROR, job=7, sender=SCHEDULER_SENDER), refusal)  # type: ignore[arg-type]
    assert said == [Kind.BYE]
    assert ended == [(0, "") if left == 2 else (1, "scheduler: register first")]
