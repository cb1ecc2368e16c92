"""Published data that tests read and this tree does not carry: in the folder that a variable names, or in one next to the checkout."""

from __future__ import annotations

import os
from pathlib import Path


def published(variable: str, folder: str, file: str) -> Path | None:
    """The folder with that file: the variable's, else one of that name in a neighbour of the checkout; None if there is none."""
    if named := os.environ.get(variable):
        return Path(named)
    return next((found.parent for found in sorted(Path(__file__).parents[3].glob(f"*/{folder}/{file}"))), None)


TRACES = published("PSGC_TRACES", "traces", "gpt2.csv")  # of Espresso's artefact: a CSV a model
ANSWERS = published("PSGC_ANSWERS", "perf-model", "public.json")  # the closed model's, to questions
