"""Sparse codecs on the GPU: which elements are sent, where they are, and their sums."""
