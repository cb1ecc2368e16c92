"""This process's figures for the script: the session's own report by the one table of figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgc.observe.table import figures_of
from psgc.torch.session.api import current_session


def metrics() -> dict[str, Any]:
    """This rank's figures since it joined, by the names of docs/observation.md (*Figures*): those that `psgc top --json` has, and Prometheus. A figure by
    codec or bucket is a dict of its own; None: not known yet. Empty where the process is alone. Raises UsageError before ``init``."""
    report = current_session().report()
    return {} if report is None else dict(figures_of("worker", report))


def numbers(prefix: str = "psgc/") -> dict[str, float]:
    """The figures of ``metrics`` that are numbers, for a logger of scalars. A figure by codec or bucket has a name for each: ``psgc/codec_bytes/int8``."""
    found: dict[str, float] = {}
    for name, value in metrics().items():
        for label, number in (value if isinstance(value, Mapping) else {"": value}).items():
            if isinstance(number, int | float):
                found[f"{prefix}{name}/{label}" if label else f"{prefix}{name}"] = number
    return found
