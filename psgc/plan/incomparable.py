"""Which methods have no plan beside this one, and why: a line for each reason, for tables and pages.

Owns the lines. The reasons come from the methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from psgc.errors import UsageError
from psgc.plan.found import Found, RuledOut


def incomparable(rivals: Mapping[str, Found | UsageError]) -> list[str]:
    """The lines. rivals: by name, the methods' plans, or why there is none."""
    lines: dict[str, list[str]] = {}
    for name, why in rivals.items():
        if isinstance(why, UsageError):
            lines.setdefault(_line(name, why), []).append(name)
    return [line.format(", ".join(names)) for line, names in lines.items()]


def _line(name: str, why: UsageError) -> str:
    """With a place for the methods' names."""
    if isinstance(why, RuledOut):
        return f"not comparable{why.by}: {{}}"
    text = str(why).removeprefix(f"method {name}: ").replace("{", "{{").replace("}", "}}")
    return f"{{}}: {text}"
