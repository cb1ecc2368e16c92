"""Rules that are broken on purpose: a simulation that does not see a broken one says nothing of a rule that is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import pytest
from sim_members import WrongError
from simulation import Scenario

Mutation = Callable[[], AbstractContextManager[Any]]
S = TypeVar("S", bound=Scenario)


def method(cls: type, name: str, make: Callable[[Any], Any]) -> Mutation:
    """Replace a method by what ``make`` makes of it."""
    return lambda: patch.object(cls, name, make(getattr(cls, name)))


@dataclass(frozen=True, slots=True)
class Rules(Generic[S]):
    """run: simulates a scenario; raises WrongError. seeds: how many of each scenario. broken: by the rule, a scenario that needs it, and what breaks it."""

    run: Callable[[S], Any]
    seeds: int
    broken: Mapping[str, tuple[S, Mutation]]

    @property
    def scenarios(self) -> list[S]:
        """Those that some rule is broken in, each once."""
        return list(dict.fromkeys(scenario for scenario, _ in self.broken.values()))

    def simulate(self, scenario: S) -> None:
        for seed in range(self.seeds):
            self.run(replace(scenario, seed=seed))

    def see(self, rule: str) -> None:
        """Fail unless the simulation sees that the rule is broken."""
        scenario, mutation = self.broken[rule]
        with mutation(), pytest.raises(WrongError):
            self.simulate(scenario)
