"""Lists the methods that have no plan for a problem: one line for each reason, for tables and pages.

Owns the lines; the reasons come from the methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from psgc.errors import UsageError
from psgc.plan.methods.result import Found, RuledOut


def incomparable(rivals: Mapping[str, Found | UsageError]) -> list[str]:
    """The lines. rivals: the methods' plans by name, or the error why there is none."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, why in rivals.items():
        if isinstance(why, UsageError):
            lines.setdefault(_around(name, why), []).append(name)
    return [f"{before}{', '.join(names)}{after}" for (before, after), names in lines.items()]


def _around(name: str, why: UsageError) -> tuple[str, str]:
    """The text before and after the methods' names."""
    if isinstance(why, RuledOut):
        return f"not comparable{why.by}: ", ""
    return "", f": {str(why).removeprefix(f'method {name}: ')}"
