"""The planning methods by name, one row each. The same costs and the same timeline judge all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from psgc.errors import UsageError
from psgc.plan.methods.baselines import byteps_compress, fp32, hipress, hitopkcomm
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.result import Found
from psgc.plan.methods.search import search
from psgc.plan.model.problem import Problem

Method = Callable[[Problem], Found]
METHODS: Final[Mapping[str, Method]] = {
    "psgc": search,
    "espresso": espresso,
    "fp32": fp32,
    "byteps-compress": byteps_compress,
    "hitopkcomm": hitopkcomm,
    "hipress": hipress,
}


def find(method: str, problem: Problem) -> Found:
    """The method's plan. Raises UsageError for an unknown method."""
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    return METHODS[method](problem)
