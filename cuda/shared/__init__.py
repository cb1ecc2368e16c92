"""Integers in a scale that all workers share, on the GPU."""
