"""What a server's pod needs: memory by the parameters it holds, cores by its link. docs/operations.md explains the numbers, which are measured there."""

from __future__ import annotations

import math
from typing import Final

from psgc.codecs.scheme import Scheme

BASE_BYTES: Final = 512 << 20  # an interpreter with kernels, before any parameter
HELD_BYTES: Final = 16  # a parameter: two results and, with feedback, two residuals
GIB: Final = 1 << 30
GBIT_A_CORE: Final = 10  # of a server's link; with none over TCP a core is full at 13
_SAMPLE: Final = 1 << 20


def memory(parameters: float, servers: int, workers: int, scheme: Scheme) -> str:
    """Of one of ``servers``, to which ``workers`` push over TCP, so that it holds a payload of each; as Kubernetes writes it."""
    pushed = scheme.push_bound(_SAMPLE) / _SAMPLE
    needed = BASE_BYTES + parameters / servers * (HELD_BYTES + pushed * workers)
    return f"{math.ceil(needed / GIB)}Gi"


def cpu(link_gbit: float) -> str:
    """Cores of one server: one for its network thread, and those that keep its link busy."""
    return str(1 + math.ceil(link_gbit / GBIT_A_CORE))
