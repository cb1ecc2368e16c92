"""Low-rank schemes on the GPU."""
