"""Building blocks of quantizing codecs: blocks that share a scale, and the rounding of their elements to codes."""
