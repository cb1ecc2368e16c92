"""What `benchmarks/gpu.py` has measured on GPUs: docs/results/DEVICE.json of the checkout that psgc runs from, if it runs from one.

Reads and interprets the files; `psgc codecs` and `psgc advise` print from it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.profile import CostCurve, Profile

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "results"


@dataclass(frozen=True, slots=True)
class GpuResult:
    """One file. rows: of `psgc bench kernels --device cuda`, psgc's own only."""

    path: Path
    device: str
    date: str
    rows: tuple[dict[str, Any], ...]

    def of(self, codec: str) -> dict[int, dict[str, dict[str, Any]]]:
        """The codec's rows, by number of elements and operation."""
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["codec"] == codec:
                found.setdefault(row["numel"], {})[row["op"]] = row
        return dict(sorted(found.items()))

    def curve(self, codec: str) -> CostCurve | None:
        """Encode, and decode with the residual's commit, as profiles have them; None for a codec that was not measured."""
        sizes = {numel: ops for numel, ops in self.of(codec).items() if {"encode", "decode"} <= ops.keys()}
        if not sizes:
            return None
        decode = [1e6 * sum(ops[op]["seconds"] for op in ("decode", "commit") if op in ops) for ops in sizes.values()]
        return CostCurve(tuple(map(float, sizes)), tuple(1e6 * ops["encode"]["seconds"] for ops in sizes.values()), tuple(decode))

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row["codec"] for row in self.rows))


def gpu_results(folder: Path = FOLDER) -> list[GpuResult]:
    """All files, by name; those of dry runs do not count. Raises UsageError, naming the file, for one that is no such document."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
            if document["dry_run"]:
                continue
            rows = tuple(row for row in document["steps"].get("kernels", {}).get("rows", ()) if row["implementation"] == "psgc")
            for row in rows:
                if not (row["seconds"] > 0 and row["numel"] > 0 and isinstance(row["codec"], str) and isinstance(row["op"], str)):
                    raise ValueError(f"row {row!r:.80}")
            found.append(GpuResult(path, str(document["device"]), str(document["date"]), rows))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: not what benchmarks/gpu.py writes ({type(error).__name__}: {error}); run it again, or remove the file"
            ) from None
    return found


def result_for(gpu: str, folder: Path = FOLDER) -> GpuResult | None:
    """The results of a GPU, given by its short name (h200) or its full one; None if it has not been measured."""
    word = re.sub(r"[^a-z0-9]", "", gpu.lower())
    for result in gpu_results(folder):
        words = re.findall(r"[a-z0-9]+", result.device.lower())
        if word and (word in words or word == "".join(words)):
            return result
    return None


def cited(result: GpuResult) -> str:
    """Where figures come from, in words."""
    return f"measured on {result.device}, {result.date} (docs/results/{result.path.name})"


def with_measured_codecs(profile: Profile, gpu: str) -> tuple[Profile, str]:
    """The profile, with this GPU's times from benchmarks/gpu.py added for codecs without GPU times, and a note that says so."""
    result = result_for(gpu)
    curves = {} if result is None else {codec: curve for codec in result.codecs if (curve := result.curve(codec)) is not None}
    fresh = {codec: curve for codec, curve in curves.items() if "gpu" not in profile.codecs.get(codec, {})}
    if result is None or not fresh:
        return profile, ""
    codecs = {**profile.codecs, **{codec: {**profile.codecs.get(codec, {}), "gpu": curve} for codec, curve in fresh.items()}}
    return replace(profile, codecs=codecs), f"times of {', '.join(fresh)} on the GPU are {cited(result)}, not estimates"
