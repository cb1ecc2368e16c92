"""Which methods have no plan beside this one, and why: a line for each reason, for tables and pages.

Owns the lines. The reasons come from the methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from psgc.errors import UsageError
from psgc.plan.found import Found, RuledOut


def incomparable(rivals: Mapping[str, Found | UsageError]) -> list[str]:
    """The lines. rivals: by name, the methods' plans, or why there is none."""
    ruled_out: dict[str, list[str]] = {}
    told = []
    for name, why in rivals.items():
        if isinstance(why, RuledOut):
            ruled_out.setdefault(why.by, []).append(name)
        elif isinstance(why, UsageError):
            told.append(f"{name}: {str(why).removeprefix(f'method {name}: ')}")
    return [*(f"not comparable{by}: {', '.join(names)}" for by, names in ruled_out.items()), *told]
