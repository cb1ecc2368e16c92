"""Steps of a named tensor that is still being declared: they begin in the order in which the script submitted them, on every rank."""

from __future__ import annotations

from typing import Any

from psgc.config import Config
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.program.ranks import Ranks
from psgc.worker.cluster import ClusterSession
from psgc.worker.membership import Membership


class Network:
    """In place of the network thread: the test says when the layout is there."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.told: Any = None

    def declare(self, declaration: Declaration, then: Any) -> None:
        assert self.told is None, "declared once"
        self.told = then


class Executor:
    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def add(self, layout: Layout, steps: int = 0) -> None:
        pass

    def submit(self, layout: Layout, bucket: int, submission: Any) -> None:
        self.submitted.append(submission.buffer)


def test_a_step_that_is_submitted_while_the_layout_arrives_does_not_overtake_those_before_it() -> None:
    declaration = Declaration("x", "adhoc", (TensorSpec("x", (4,), "float32"),), "none", True)
    session = ClusterSession(Config(nodes=2, servers=1, root_host="localhost", root_port=1, node=0))
    session.rank, session.ranks = 0, Ranks((1, 1))
    session._network._shut()  # never started
    network, executor = Network(), Executor()
    session._network, session._executor = network, executor  # type: ignore[assignment]
    for buffer in ("first", "second"):
        session.submit_named(declaration, buffer)  # type: ignore[arg-type]
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2)
    network.membership.layouts["x"] = layout  # the network thread knows it, and has not told yet
    session.submit_named(declaration, "third")  # type: ignore[arg-type]
    assert executor.submitted == []
    network.told(layout)
    session.submit_named(declaration, "fourth")  # type: ignore[arg-type]
    assert executor.submitted == ["first", "second", "third", "fourth"]
