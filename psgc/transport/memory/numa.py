"""Memory on a NUMA node of choice: a device's node, from /sys, and the kernel's policy of the calling thread while memory is made.

The policy is a preference: where the node is full, memory comes from another. A policy that the user has set (numactl) stays. Where the kernel does not allow
it, as containers without CAP_SYS_NICE may not, nothing is changed and memory lies where its first user runs.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DEFAULT: Final = 0  # MPOL_DEFAULT
PREFERRED: Final = 1  # MPOL_PREFERRED
MOST_NODES: Final = 1024
_CALLS: Final = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
_BUS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_Mask = ctypes.c_ulong * (MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong)))
Call = Callable[..., int]  # of the C library's ``syscall``: below 0 where the kernel refuses


def bus_of(domain: int, bus: int, device: int) -> str:
    """A PCI device's address as /sys has it; "" where it is not known (a number below 0)."""
    return "" if min(domain, bus, device) < 0 else f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of(bus: str, root: Path = Path("/sys")) -> int | None:
    """The NUMA node of a PCI device; None for a machine of one node, and where /sys does not say."""
    if not _BUS.match(bus):
        return None
    try:
        node = int((root / "bus/pci/devices" / bus / "numa_node").read_text())
        nodes = [entry for entry in (root / "devices/system/node").iterdir() if re.match(r"node\d+$", entry.name)]
    except (OSError, ValueError):
        return None
    return node if 0 <= node < MOST_NODES and len(nodes) > 1 else None


@contextmanager
def memory_on(node: int | None, call: Call | None = None) -> Iterator[bool]:
    """Have what the calling thread touches first within the block come from this node (None: from anywhere). Gives whether the kernel does so."""
    places = _CALLS.get(platform.machine())
    if node is None or places is None:
        yield False
        return
    call = call or _syscall()
    set_policy, get_policy = places
    policy, mask = ctypes.c_int(-1), _Mask()
    if call(get_policy, ctypes.byref(policy), None, 0, None, 0) < 0 or policy.value != DEFAULT:
        yield False
        return
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // word] = 1 << node % word
    if call(set_policy, PREFERRED, mask, MOST_NODES) < 0:
        yield False
        return
    try:
        yield True
    finally:
        call(set_policy, DEFAULT, None, 0)


def may_place_memory(call: Call | None = None) -> bool:
    """Whether the kernel lets this process say where its memory lies."""
    with memory_on(0, call) as placed:
        return placed


def _syscall() -> Call:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def call(number: int, *arguments: object) -> int:
        # A C variadic function reads full words: plain Python integers would be passed as ints.
        words = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
        return int(syscall(ctypes.c_long(number), *words))

    return call
