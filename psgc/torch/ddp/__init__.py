"""Models that torch's DistributedDataParallel wraps, and torch's loss scaler."""
