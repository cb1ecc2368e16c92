"""Under torchrun what every worker of a node would say in the same words is said by one of them."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.config import Agent, agent
from psgc.torch.session.once import claimed, first_to_say

TORCHRUN = {
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
HERE = Agent("localhost", 29500, "1", "2")


class Store:
    """An agent's, as far as it is needed."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def __call__(self, _: Agent) -> Store:
        return self

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


def test_one_of_many_says_each_text() -> None:
    store = Store()
    assert [claimed(store, HERE, text) for text in ("a", "a", "b", "a", "b")] == [True, False, True, False, False]


@pytest.mark.parametrize("other", [Agent("localhost", 29500, "0", "2"), Agent("localhost", 29500, "1", "3")])
def test_another_node_and_another_attempt_say_it_too(other: Agent) -> None:
    store = Store()
    assert claimed(store, HERE, "a") and claimed(store, other, "a")


def test_where_the_store_does_not_answer_everybody_says_it() -> None:
    def refuse(_: Agent) -> Any:
        raise RuntimeError("Connection refused")

    assert claimed(refuse, HERE, "a") and claimed(refuse, HERE, "a")


def test_the_agent_is_found_where_it_serves_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert agent() == HERE
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert agent() is None and first_to_say("a") and first_to_say("a")
