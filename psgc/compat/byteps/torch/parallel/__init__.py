"""``DistributedDataParallel``: a model that averages its gradients."""

from psgc.torch import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
