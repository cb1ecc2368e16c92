"""psgc: communication for data-parallel training on networks that are too slow for it."""

__version__ = "0.1.0"
