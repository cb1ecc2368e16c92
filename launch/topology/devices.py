"""The number of workers of a machine, and the GPUs that each of them sees. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psgc.errors import ConfigError
from psgc.launch.topology.machine import Gpu, Topology

SEEN: Final = "CUDA_VISIBLE_DEVICES"
MODES: Final = ("inherited", "listed", "own")


def local_size(env: Mapping[str, str]) -> int:
    """Worker processes on this node: BYTEPS_LOCAL_SIZE, else one for each visible device, else one."""
    asked = env.get("BYTEPS_LOCAL_SIZE", "").strip()
    if asked.isdigit():
        return max(1, int(asked))
    return len(_listed(env)) or 1


def seen_devices(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a local rank, from PSGC_CUDA_DEVICES; {} if it stays unchanged. Raises ConfigError."""
    mode = _mode(env)
    if mode not in MODES:
        raise ConfigError(f"PSGC_CUDA_DEVICES={mode!r}: expected one of {', '.join(MODES)}")
    devices = _listed(env)
    if mode == "listed" and devices:
        return {SEEN: ",".join(devices)}
    if mode != "own":
        return {}
    if devices and local_rank >= len(devices):
        raise ConfigError(f"PSGC_CUDA_DEVICES=own: local rank {local_rank} has no device of its own among {','.join(devices)}")
    return {SEEN: devices[local_rank] if devices else str(local_rank)}


def gpus_of_ranks(env: Mapping[str, str], machine: Topology) -> dict[int, Gpu]:
    """By local rank, the GPU of the machine that is the worker's, which uses the one of its local rank among those that it sees. Left out are those that
    cannot be told, such as parts of GPUs. nvidia-smi lists all GPUs, whatever CUDA_VISIBLE_DEVICES has."""
    entries = _listed(env) if _mode(env) in ("listed", "own") else []
    if not entries:
        if _mode(env) == "own" or SEEN not in env:
            return {gpu.index: gpu for gpu in machine.gpus}
        entries = [entry.strip() for entry in env[SEEN].split(",")]
    found = ((rank, machine.gpu(entry)) for rank, entry in enumerate(entries))
    return {rank: gpu for rank, gpu in found if gpu is not None}


def _mode(env: Mapping[str, str]) -> str:
    return env.get("PSGC_CUDA_DEVICES", "").strip() or "inherited"


def _listed(env: Mapping[str, str]) -> list[str]:
    for name in ("NVIDIA_VISIBLE_DEVICES", SEEN):
        devices = [d.strip() for d in env.get(name, "").split(",") if d.strip() and d.strip() not in ("all", "none", "void")]
        if devices:
            return devices
    return []
