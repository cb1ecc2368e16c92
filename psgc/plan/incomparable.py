"""Which methods have no plan beside this one, and why: a line for each reason, for tables and pages.

Owns the words and which reasons are one. The reasons come from the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psgc.plan.found import Found
from psgc.plan.plan import UNCOMPRESSED

# In the reason of every method that could answer if less were ruled out.
CONSTRAINED: Final = "the constraints"
# How that of a method begins which must encode, where a job has nothing to do it with.
NOTHING_ENCODES: Final = f"codec {UNCOMPRESSED}: "
UNDER_CONSTRAINTS: Final = " under these constraints"
WITHOUT_ENCODING: Final = ", since encoding is ruled out"


def incomparable(rivals: Mapping[str, Found | str]) -> list[str]:
    """The lines. rivals: by name, the methods' plans, or why there is none."""
    reasons: dict[str, list[str]] = {}
    for name, why in rivals.items():
        if not isinstance(why, Found):
            reasons.setdefault(_reason(why.removeprefix(f"method {name}: ")), []).append(name)
    return [_line(why, ", ".join(names)) for why, names in reasons.items()]


def _line(why: str, names: str) -> str:
    return f"not comparable{why}: {names}" if why in (UNDER_CONSTRAINTS, WITHOUT_ENCODING) else f"{names}: {why}"


def _reason(why: str) -> str:
    if CONSTRAINED in why:
        return UNDER_CONSTRAINTS
    return WITHOUT_ENCODING if why.startswith(NOTHING_ENCODES) else why
