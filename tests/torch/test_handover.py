"""A handover that fails leaves nothing behind that could end the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from psgc.config import Config
from psgc.errors import GroupError
from psgc.torch.elastic.handover import _Quiet
from psgc.worker.collectives.breaking import fail


class Session:
    """What is looked up in it, and not given up."""

    rank, failed, config = 0, False, Config(heartbeat_s=1e6)

    def __init__(self) -> None:
        self.open: list[tuple[str, Callable[[bytes], None]]] = []

    def check(self) -> None: ...

    def lookup_soon(self, name: str, then: Callable[[bytes], None]) -> None:
        self.open.append((name, then))
        if name == "there":
            then(b"value")

    def give_up_lookup(self, name: str, then: Callable[[bytes], None]) -> None:
        self.open.remove((name, then))


def test_what_a_handover_that_is_given_up_has_looked_up_is_given_up_too() -> None:
    session = Session()
    quiet: Any = _Quiet(cast("Any", session), lambda: bool(session.open))
    with pytest.raises(GroupError, match="given up"):
        quiet.lookup("state 1/0")
    assert not session.open
    assert _Quiet(cast("Any", session), lambda: False).lookup("there") == b"value"


def test_a_handover_that_breaks_holds_nobody_up_until_the_job_might_fail() -> None:
    quiet: Any = _Quiet(cast("Any", Session()), lambda: False)
    with pytest.raises(GroupError, match=r"^rank 0: exchange failed: rank 1 has left the group$"):
        fail(quiet, "exchange", "rank 1 has left the group")
