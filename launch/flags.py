"""Flags that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgc.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
ProfileText = Annotated[str, typer.Option("--profile", help="Profile: JSON, CSV with name, numel and ready_us, or a model's name.")]
ClusterText = Annotated[str, typer.Option("--cluster", help="Cluster: TOML, or the name of a ready-made one.")]

GpuText = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="The GPU of a model's name, or of a file that names none: v100, t4, a10g, a100, h100, h200; of a model's name also what it achieves in TFLOP/s.",
    ),
]


def check_gpu(verb: str, profile: str, gpu: str | None) -> None:
    """Raise UsageError if ``--gpu`` is given beside a profile file with times of its own hardware, or is none that is known beside a file without."""
    if gpu is None or not Path(profile).is_file():
        return
    from psgc.plan.inputs.estimates import MEMORY_GBPS, is_known_gpu
    from psgc.plan.inputs.profile import load_profile

    found = load_profile(profile)
    if found.hardware or any("gpu" in curves for curves in found.codecs.values()):
        own = f"its own hardware, {found.hardware}" if found.hardware else "codecs on its own GPU"
        raise UsageError(
            f"{verb}: --gpu {gpu}: {profile} is a file with times of {own}; use --gpu with a model's name, or with a file that has none"
        )
    if not is_known_gpu(gpu):
        raise UsageError(
            f"{verb}: --gpu {gpu}: expected the GPU whose codec times {profile} is planned with, one of {', '.join(MEMORY_GBPS)}"
        )
