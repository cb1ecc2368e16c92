"""A handover that fails leaves nothing behind that could end the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from psgc.errors import GroupError
from psgc.torch.elastic.handover import _Quiet


class Session:
    """What is looked up in it, and not given up."""

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
