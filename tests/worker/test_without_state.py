"""A worker that is asked for the job's state and has none: its script has not come to its Elastic yet, or has none."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.program.ranks import Ranks
from psgc.worker.cluster import ClusterSession
from psgc.worker.session import Handover

ASKED = Handover(1, 1, takes=False)


class Network:
    """In place of the network thread."""

    def __init__(self) -> None:
        self.handovers: Any = None
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        self.faults.append(text)


def opened(on_worker_loss: str) -> tuple[ClusterSession, Network]:
    session = ClusterSession(Config(nodes=2, servers=1, root_host="localhost", root_port=1, node=0, on_worker_loss=on_worker_loss))
    session.rank, session.ranks = 0, Ranks((1, 1))
    session._network._shut()  # never started
    network = Network()
    session._network = network  # type: ignore[assignment]
    network.handovers = session._without_state
    return session, network


def test_the_job_goes_on_until_the_script_has_synchronised_something_without_elastic() -> None:
    session, network = opened("wait")
    network.handovers(ASKED)
    network.handovers(Handover(1, 1, takes=True))
    assert network.faults == [], "its script may be preparing"
    session._checked(Declaration("x", "adhoc", (TensorSpec("x", (4,), "float32"),), "none", True))
    network.handovers(Handover(1, 1, takes=True))
    assert network.faults == []
    network.handovers(ASKED)
    assert "rank 1 died and another process takes its place, but the script of rank 0 has no psgc.torch.Elastic" in network.faults[0]


def test_a_barrier_in_a_session_that_has_been_left_is_refused() -> None:
    session, _ = opened("stop")
    session.outcome.closed = True
    with pytest.raises(UsageError, match="what was made in that job does not go on in another"):
        session.barrier()


def test_an_elastic_hears_what_is_asked_from_then_on_and_a_second_one_is_refused() -> None:
    session, network = opened("wait")
    heard: list[Handover] = []
    session.hear_of_handovers(heard.append)
    network.handovers(ASKED)
    assert heard == [ASKED] and network.faults == []
    with pytest.raises(
        UsageError, match=r"this process has a psgc\.torch\.Elastic already.*; train in the one's loop, or set PSGC_ON_WORKER_LOSS=stop"
    ):
        session.hear_of_handovers(print)
    session, network = opened("stop")
    for _ in range(2):
        session.hear_of_handovers(heard.append)
