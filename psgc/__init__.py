"""psgc: communication for data-parallel training on networks that are too slow for it."""

from psgc.processes.checkpoints import saving

__all__ = ["saving"]
__version__ = "0.1.0"
