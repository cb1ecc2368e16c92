"""Compiles kernels, and caches their machine code on disk."""
