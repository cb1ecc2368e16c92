"""Names for the codecs, so that ``compression=psgc.Compression.onebit`` reads as in BytePS and Horovod; each is plain codec text."""

from __future__ import annotations


class Compression:
    """Codec texts at their defaults. Any other text works as well: ``"topk:k=0.001"``, ``"onebit/int8"`` (push / pull)."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    onebit = "onebit"
    topk = "topk"
