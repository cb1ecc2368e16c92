"""docs/design.md has one table of the limits of time: all of them, with the defaults that hold."""

from __future__ import annotations

import re
from pathlib import Path

from psgc.config import Config
from psgc.variables import VARIABLES


def test_the_table_of_limits_has_every_setting_in_seconds_and_its_default() -> None:
    page = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    rows = {name: float(default) for name, default in re.findall(r"^\| (PSGC_\w+) \| ([\d.]+) \|", page, re.M)}
    settings = {v.name: getattr(Config(), v.field) for v in VARIABLES if v.name.endswith("_S")}
    assert rows == settings
