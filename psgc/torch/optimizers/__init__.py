"""DistributedOptimizer and the optimizers that know of the compression."""
