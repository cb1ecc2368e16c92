"""Names of codecs: ``Compression.none``, ``Compression.fp16``, and psgc's others."""

from psgc.torch import Compression

__all__ = ["Compression"]
