"""What was asked for and comes to nothing is told, once, by rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.config import Config
from psgc.torch import unheeded


class Joined:
    """What is looked at of a session."""

    def __init__(self, codec: str | None, rank: int = 0, synchronised: bool = True) -> None:
        env = {"DMLC_NUM_WORKER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}
        self.config = Config.from_env(env if codec is None else {**env, "PSGC_CODEC": codec})
        self.rank, self.synchronised = rank, synchronised


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("asked", "given", "chosen", "warned"), [
    ("int8", None, "int8", False),
    (None, None, "none", False),
    (None, "onebit", "onebit", False),
    ("int8", "int8", "int8", False),
    ("topk", "topk:k=0.01", "topk:k=0.01", False),  # the same, written out
    ("int8", "none", "none", True),
    ("int8", "onebit", "onebit", True),
    ("none", "onebit", "onebit", True),
])  # fmt: skip
def test_a_codec_that_the_script_overrides_is_told_once(
    asked: str | None, given: str | None, chosen: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session: Any = Joined(asked)
    for _ in range(2):
        assert unheeded.choose(session, given, "DistributedOptimizer") == chosen
    unheeded.tell_end(session)
    assert len(told(caplog)) == warned
    assert all(
        f"PSGC_CODEC={asked} (--codec) has no effect on DistributedOptimizer: the script gives it '{given}'" in text
        for text in told(caplog)
    )


def test_rank_0_alone_tells(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8", rank=1, synchronised=False)
    unheeded.choose(session, "none", "DistributedOptimizer")
    unheeded.tell_end(session)
    assert told(caplog) == []


def test_a_codec_that_nothing_took_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8")
    unheeded.tell_end(session)
    assert told(caplog) == ["PSGC_CODEC=int8 (--codec) had no effect: no DistributedOptimizer and no ddp_hook of the script took it"]


def test_a_script_that_synchronised_nothing_is_told_so_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8", synchronised=False)
    unheeded.tell_end(session)
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith("rank 0: the script synchronised nothing: no gradient was sent")
