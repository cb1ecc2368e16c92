"""Planning tests whose sentences do not depend on how short a plan is search without annealing, which takes most of a search's time."""

from __future__ import annotations

import pytest

from psgc.plan.methods import search

ANNEALED = {"test_annealing", "test_anytime", "test_search", "test_ordering"}  # files about the search itself


@pytest.fixture(autouse=True)
def _quick_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem not in ANNEALED:
        monkeypatch.setattr(search, "ANNEALING", search.QUICK)
