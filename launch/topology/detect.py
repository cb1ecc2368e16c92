"""Looks at this machine: /sys, and nvidia-smi where there is one. What cannot be found out becomes a note, never an error."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from psgc.errors import UsageError
from psgc.launch.topology import nvidia, sysfs
from psgc.launch.topology.devices import gpus_of_ranks
from psgc.launch.topology.machine import Gpu, Topology

ROOTS: Final = "BYTEPS_REDUCE_ROOTS"
SWITCHES: Final = "BYTEPS_PCIE_SWITCH_SIZE"
SMI_S: Final = 20.0  # nvidia-smi takes seconds where the driver is not kept loaded
AUTO: Final = "auto"
Ask = Callable[[tuple[str, ...]], str]


def detect(root: Path = Path("/sys"), ask: Ask | None = None) -> Topology:
    """The topology of the machine whose /sys this is. ask: answers nvidia-smi's arguments with its text, and raises UsageError if it cannot; by default
    nvidia-smi itself, if there is one."""
    ask = ask or (_smi if shutil.which("nvidia-smi") else None)
    notes: list[str] = []
    gpus = _gpus(root, ask, notes)
    paths: dict[tuple[str, str], str] = {}
    if ask is not None and len(gpus) > 1:
        try:
            paths = nvidia.read_paths(ask(("topo", "-m")))
        except UsageError as error:
            notes.append(str(error))
    return Topology(gpus, sysfs.nics(root), sysfs.numa_nodes(root), sysfs.sockets(root), paths, tuple(notes))


def switch_size(env: Mapping[str, str], found: Topology) -> int:
    """BYTEPS_PCIE_SWITCH_SIZE, the GPUs behind each PCIe switch; 0 where it is not set, or there are no GPUs. Raises UsageError for a size that does not
    suit them."""
    text = env.get("BYTEPS_PCIE_SWITCH_SIZE", "").strip()
    if not text or not found.gpus or text == AUTO:
        return 0
    if not text.isdigit():
        raise UsageError(f"BYTEPS_PCIE_SWITCH_SIZE={text!r:.40} is wrong: expected how many GPUs are behind a PCIe switch")
    found.switch_groups(max(int(text), 1))
    return max(int(text), 1)


def told(env: Mapping[str, str], size: int, found: Callable[[], Topology]) -> dict[str, str]:
    """BYTEPS_REDUCE_ROOTS and BYTEPS_PCIE_SWITCH_SIZE where they are ``auto``, as the machine has them for ``size`` workers, each with the GPU that it sees;
    "" where nothing of it is of use. found: looks at the machine, if it has to. Raises UsageError where the machine's GPUs are not the workers'."""
    asked = [name for name in (ROOTS, SWITCHES) if env.get(name, "").strip() == AUTO]
    if not asked:
        return {}
    machine = found()
    gpus = gpus_of_ranks(env, machine)
    if sorted(gpus) != list(range(size)):
        raise UsageError(
            f"{asked[0]}=auto takes local ranks for the GPUs that workers see, but there are {size} worker(s) and {len(gpus)} GPU(s) that can be told; "
            f"name local ranks, or unset it"
        )
    machine = machine.of_ranks(gpus)
    roots, switch = as_detected(machine)
    values = {ROOTS: ",".join(map(str, roots)), SWITCHES: str(switch or "")}
    return {name: values[name] for name in asked}


def as_detected(found: Topology) -> tuple[tuple[int, ...], int]:
    """The roots of a machine with NVLinks, or how many GPUs are behind each switch of one without; nothing and 0 where that makes no difference."""
    if found.nvlinks_of_a_gpu:
        return found.reduce_roots(), 0
    groups = found.switch_groups()
    first = len(groups[0]) if groups else 0
    alike = len(groups) > 1 and first > 1 and len(found.gpus) % first == 0 and groups == found.switch_groups(first)
    return (), first if alike else 0


def _gpus(root: Path, ask: Ask | None, notes: list[str]) -> tuple[Gpu, ...]:
    """nvidia-smi's list, else that of the PCI tree."""
    if ask is not None:
        try:
            found = nvidia.read_gpus(ask((f"--query-gpu={','.join(nvidia.QUERY)}", "--format=csv,noheader")))
            return tuple(replace(gpu, place=sysfs.place_of(root, gpu.bus), numa=sysfs.numa_of(root, gpu.bus)) for gpu in found)
        except UsageError as error:
            notes.append(str(error))
    found = sysfs.gpus(root)
    if found and ask is None:
        notes.append(f"{len(found)} NVIDIA GPU(s) on PCI, but no nvidia-smi in PATH: their NVLinks are not known")
    return found


def _smi(arguments: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"nvidia-smi {arguments[0]}: {error}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise UsageError(f"nvidia-smi {arguments[0]}: status {done.returncode}: {said[0] if said else 'nothing said'!s:.120}")
    return done.stdout
