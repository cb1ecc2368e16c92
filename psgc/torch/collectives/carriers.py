"""The carriers of groups, in order of preference: a group uses the first one that takes its members and what they exchange."""

from __future__ import annotations

from typing import Final

from psgc.torch.collectives import device_group, gloo
from psgc.torch.collectives.carrier import Carrier
from psgc.torch.collectives.memory import SharedMemory

CARRIERS: Final[tuple[Carrier, ...]] = (device_group.GpuToGpu(), SharedMemory(), gloo.Gloo())
