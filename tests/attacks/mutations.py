"""What the fuzzers share: the loop, after which nothing may be left behind, and the damage that is done to right messages."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 64 << 20


def resident(pid: int | str = "self") -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def repeat(times: int, once: Callable[[int], None]) -> None:
    """Call it so often, with the number of the call. Fails if this process has grown between half of them and the end."""
    sizes = []
    for number in range(times):
        once(number)
        if number in (times // 2, times - 1):
            sizes.append(resident())
    assert sizes[-1] - sizes[0] < GROWTH_BYTES, sizes


def flipped(rng: random.Random, data: bytes, within: int = 0) -> bytes:
    """With one bit of it changed. within: of its first bytes; 0: of any."""
    changed = bytearray(data)
    changed[rng.randrange(within or len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def noise(rng: random.Random, most: int = 300) -> bytes:
    return rng.randbytes(rng.randrange(1, most))
