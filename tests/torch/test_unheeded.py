"""What was asked for and comes to nothing is told, once, by rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.config import Config
from psgc.torch.session import without_effect


class Joined:
    """What is looked at of a session."""

    def __init__(self, codec: str | None, rank: int = 0, synchronised: bool = True) -> None:
        env = {"DMLC_NUM_WORKER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}
        self.config = Config.from_env(env if codec is None else {**env, "PSGC_CODEC": codec})
        self.rank, self.synchronised = rank, synchronised
        self.whole = self


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
        assert without_effect.choose(session, given, "DistributedOptimizer") == chosen
    without_effect.tell_end(session)
    assert len(told(caplog)) == warned
    assert all(f"PSGC_CODEC={asked} has no effect on DistributedOptimizer: the script gives it '{given}'" in text for text in told(caplog))


def test_rank_0_alone_tells(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8", rank=1, synchronised=False)
    without_effect.choose(session, "none", "DistributedOptimizer")
    without_effect.tell_end(session)
    assert told(caplog) == []


def test_a_codec_that_nothing_took_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8")
    without_effect.tell_end(session)
    assert told(caplog) == ["PSGC_CODEC=int8 had no effect: no DistributedOptimizer and no ddp_hook of the script took it"]


@pytest.mark.parametrize(("codec", "env", "said"), [
    ("int8", {}, "PSGC_CODEC=int8 has no effect: this is a job of one worker"),
    ("int8", {"PSGC_LAUNCHER": "psgc-launcher/1/ab:3"}, "PSGC_CODEC=int8 (--codec) has no effect: this is a job of one worker"),
    ("onebitt", {}, ""),  # DistributedOptimizer says that there is none
])  # fmt: skip
def test_in_a_job_of_one_a_codec_that_exists_has_no_effect(
    codec: str, env: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    without_effect.tell_start(Config.from_env({"PSGC_CODEC": codec, **env}))
    assert [text.partition(", and nothing is sent")[0] for text in told(caplog)] == ([said] if said else [])


def test_a_script_that_synchronised_nothing_is_told_so_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Joined("int8", synchronised=False)
    without_effect.tell_end(session)
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith("rank 0: the script synchronised nothing: no gradient was sent")


@pytest.mark.parametrize("servers", [0, 1])
def test_a_priority_is_told_once_where_no_servers_heed_it(ranks: Any, servers: int, caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int) -> None:
        for _ in range(2):
            psgc.push_pull(torch.ones(2), name="early", priority=3)
        psgc.push_pull(torch.ones(2), name="late")

    ranks.run(2, work, servers=servers, nodes=2)
    texts = [text for text in told(caplog) if "priority" in text]
    assert len(texts) == (servers == 0), texts
    assert all(text.startswith("push_pull of 'early': priority=3 has no effect: this job has no servers") for text in texts)


def test_a_seed_among_bytepss_options_is_told_once(ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = {"byteps_compressor_type": "randomk", "byteps_compressor_k": 0.1, "byteps_seed": 7}

    def work(rank: int) -> None:
        for _ in range(2):
            psgc.DistributedOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), compression=options)
        psgc.declare("x", **options)

    ranks.run(2, work, servers=0, nodes=2)
    texts = [text for text in told(caplog) if "seed" in text]
    assert texts == ["byteps_seed=7 has no effect: PSGC_SEED is the seed of all codecs; set it to 7 on every rank"]
