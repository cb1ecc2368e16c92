"""Jobs on Ray: ``launch`` runs a function in the workers of one job, and ``Config`` is for Ray Train's TorchTrainer (docs/clusters.md)."""

from __future__ import annotations

from typing import Any

from psgc.launch.on_ray.launching import PlacementError, launch

__all__ = ["Config", "PlacementError", "launch"]  # noqa: F822 - Config is looked up when it is asked for


def __getattr__(name: str) -> Any:
    if name == "Config":  # Ray Train takes seconds to import, and may not be installed
        from psgc.launch.on_ray.train import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
