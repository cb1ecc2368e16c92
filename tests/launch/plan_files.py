"""Plans of one tensor, for tests of launchers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from psgc.plan.inputs.cluster import Cluster, Link


def plan_file(path: Path, option: tuple[str, ...] = ("flat.push", "flat.pull"), codec: str = "none", **inside: Any) -> str:
    bucket = {"tensors": ["w"], "numel": 5, "parts": 1, "priority": 0, "codec": codec, "option": option}
    cluster = Cluster("c", 1, 4, Link(10, 1), Link(1, 1), 1, **inside).to_json()
    path.write_text(json.dumps({"version": 2, "model": "m", "cluster": cluster, "buckets": [bucket], "prediction": {}}))
    return str(path)
