"""Where ``auto`` takes its times from: this machine's clocks, and what codecs and copies cost on it.

Every time that ``auto`` decides by comes from one ``Measuring``. Times of a GPU's codecs are its engine's (``psgc.torch.device.engines``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from psgc.plan.inputs.profile import Curves
from psgc.processes.cores import cores_of_node
from psgc.torch.gradients.profiler import Clock, clock_for
from psgc.torch.plans.calibrating import measured_curves, within_node_gbps


class Measuring:
    """Measures on this machine."""

    def now_ns(self) -> int:
        """The clock of steps, in nanoseconds."""
        return time.perf_counter_ns()

    def clock(self, sample: torch.Tensor) -> Clock:
        """The clock by which gradients become ready. sample: one of the parameters."""
        return clock_for(sample)

    def curves(self, codecs: Sequence[str]) -> Curves:
        """What each codec costs on the CPU."""
        return measured_curves(codecs)

    def within_node_gbps(self, ranks: int, cores: int) -> float:
        """The rate at which so many ranks of a node sum in its memory."""
        return within_node_gbps(ranks, cores)

    def cores(self, launched: bool) -> int:
        """Cores that the processes of this node share. launched: see ``cores_of_node``."""
        return cores_of_node(launched)

    def compute_threads(self) -> int:
        """Threads that a rank computes with, where gradients lie in hosts' memory."""
        return torch.get_num_threads()


_in_use = Measuring()


def in_use() -> Measuring:
    """What an exchange that is made now measures with."""
    return _in_use


def use(measuring: Measuring | None = None) -> None:
    """Have ``auto`` take its times from this one: for tests, whose choices must not depend on the machine. Without an argument: from this machine again."""
    global _in_use  # noqa: PLW0603 - the process has one
    _in_use = measuring or Measuring()
