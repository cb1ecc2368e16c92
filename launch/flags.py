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
    str | None, typer.Option("--gpu", help="The GPU of a model's name: v100, t4, a10g, a100, h100, h200, or what it achieves in TFLOP/s.")
]


def check_gpu(verb: str, profile: str, gpu: str | None) -> None:
    """Raise UsageError if ``--gpu`` is given beside a profile file, whose times were measured on its own GPU."""
    if gpu is not None and Path(profile).is_file():
        raise UsageError(f"{verb}: --gpu {gpu}: {profile} is a file with times of its own GPU; use --gpu with a model's name only")
