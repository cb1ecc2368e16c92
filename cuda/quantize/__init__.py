"""The GPU side of codecs of codes in blocks with a scale: `int8`, `int4`, `fp8`, `dithering` and `tbq`."""
