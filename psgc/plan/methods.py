"""The ways of finding a plan, by name. All are judged by the same costs and the same timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from psgc.errors import UsageError
from psgc.plan.baselines import fp32
from psgc.plan.found import Found
from psgc.plan.problem import Problem

Method = Callable[[Problem], Found]
METHODS: Final[Mapping[str, Method]] = {"fp32": fp32}


def find(method: str, problem: Problem) -> Found:
    """The method's plan. Raises UsageError for a name that no method has."""
    if method not in METHODS:
        raise UsageError(f"method {method!r}: there are {', '.join(METHODS)}")
    return METHODS[method](problem)
