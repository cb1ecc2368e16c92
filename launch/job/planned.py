"""What PSGC_PLAN means to launchers: the text that a job's processes get, and the settings of nodes' inside that come with a plan.

All launchers read a plan here, so that a job runs by it alike, whoever starts it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from psgc.plan.model.level import SAFE, asks_auto, level_of

if TYPE_CHECKING:
    from psgc.plan.model.plan import Plan

PLAN: Final = "PSGC_PLAN"


def plan_told(text: str, folder: str | None = None) -> str:
    """PSGC_PLAN for processes that may change their directory: a file's absolute path, ``auto`` with or without a level as it is. folder: that a relative path
    begins at; default: this process's. Raises UsageError for an unknown level."""
    text = text.strip()
    if asks_auto(text):
        level_of(text, SAFE)
        return text
    return os.path.abspath(os.path.join(folder or os.getcwd(), text)) if text else ""


def plan_here(text: str, *, needed: bool) -> Plan | None:
    """The plan in the file that PSGC_PLAN names; None where it names none. Other machines than rank 0's need not have it. needed: this one is rank 0's.
    Raises UsageError for a plan that cannot be run."""
    text = text.strip()
    if not text or asks_auto(text) or not (needed or os.path.exists(text)):
        return None
    from psgc.plan.planfile.runtime import load_runnable

    return load_runnable(text)


def inside_of(plan: Plan | None, env: Mapping[str, str]) -> dict[str, str]:
    """The settings of nodes' inside that the plan was made with (BYTEPS_REDUCE_ROOTS, BYTEPS_PCIE_SWITCH_SIZE), unless ``env`` has them."""
    machines = None if plan is None else plan.machines
    return {} if machines is None else {name: text for name, text in machines.inside.items() if not env.get(name, "").strip()}
