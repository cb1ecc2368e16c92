"""``DistributedDataParallel``, where BytePS defines it."""

from psgc.torch import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
