"""The number of workers of a machine, and the GPUs that each of them sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psgc.errors import ConfigError

MODES: Final = ("inherited", "listed", "own")


def local_size(env: Mapping[str, str]) -> int:
    """Worker processes on this node: BYTEPS_LOCAL_SIZE, else one for each visible device, else one."""
    asked = env.get("BYTEPS_LOCAL_SIZE", "").strip()
    if asked.isdigit():
        return max(1, int(asked))
    return len(_listed(env)) or 1


def seen_devices(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a local rank, from PSGC_CUDA_DEVICES; {} if it stays unchanged. Raises ConfigError."""
    mode = env.get("PSGC_CUDA_DEVICES", "").strip() or "inherited"
    if mode not in MODES:
        raise ConfigError(f"PSGC_CUDA_DEVICES={mode!r}: expected one of {', '.join(MODES)}")
    devices = _listed(env)
    if mode == "listed" and devices:
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if mode != "own":
        return {}
    if devices and local_rank >= len(devices):
        raise ConfigError(f"PSGC_CUDA_DEVICES=own: local rank {local_rank} has no device of its own among {','.join(devices)}")
    return {"CUDA_VISIBLE_DEVICES": devices[local_rank] if devices else str(local_rank)}


def _listed(env: Mapping[str, str]) -> list[str]:
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        devices = [d.strip() for d in env.get(name, "").split(",") if d.strip() and d.strip() not in ("all", "none", "void")]
        if devices:
            return devices
    return []
