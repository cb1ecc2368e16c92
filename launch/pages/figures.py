"""``python -m psgc.launch.pages.figures docs/observation.md``: rewrites the page's table of figures, between its markers, from ``psgc/observe/table.py``; a
test compares the two."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from psgc.observe.table import FIGURES, JOB_FIGURES

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
ROLES: Final = {"worker": "workers", "server": "servers", "any": "workers, servers"}


def table() -> str:
    """The table, in Markdown."""
    lines = ["| figure | unit | of | in Prometheus, after `psgc_` | meaning |", "|---|---|---|---|---|"]
    for each in FIGURES:
        exported = f"`{each.exported}`" + (f", by `{each.label}`" if each.label else "") if each.exported else ""
        lines.append(f"| `{each.name}` | {each.unit} | {ROLES[each.role]} | {exported} | {each.meaning} |")
    for one in JOB_FIGURES:
        exported = f"`{one.exported}`" + (f", by {' and '.join(f'`{label}`' for label in one.labels)}" if one.labels else "")
        lines.append(f"| `{one.name}` | {one.unit} | the scheduler | {exported} | {one.meaning} |")
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """The page with the table as it is now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))
