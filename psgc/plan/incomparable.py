"""Which methods have no plan beside this one, and why: a line for each reason, for tables and pages.

Owns the words and which reasons are one. The reasons come from the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psgc.plan.found import Found
from psgc.plan.job import may_encode
from psgc.plan.problem import Problem

# In the reason of every method that could answer if less were ruled out.
CONSTRAINED: Final = "the constraints"
UNDER_CONSTRAINTS: Final = " under these constraints"
WITHOUT_ENCODING: Final = ", since encoding is ruled out"


def incomparable(problem: Problem, rivals: Mapping[str, Found | str]) -> list[str]:
    """The lines. rivals: by name, the methods' plans, or why there is none."""
    reasons: dict[str, list[str]] = {}
    for name, why in rivals.items():
        if not isinstance(why, Found):
            reasons.setdefault(_reason(problem, why.removeprefix(f"method {name}: ")), []).append(name)
    return [_line(why, ", ".join(names)) for why, names in reasons.items()]


def _line(why: str, names: str) -> str:
    return f"not comparable{why}: {names}" if why in (UNDER_CONSTRAINTS, WITHOUT_ENCODING) else f"{names}: {why}"


def _reason(problem: Problem, why: str) -> str:
    if CONSTRAINED in why:
        return UNDER_CONSTRAINTS
    if not problem.used or not may_encode(problem.constraints):
        return WITHOUT_ENCODING
    return why
