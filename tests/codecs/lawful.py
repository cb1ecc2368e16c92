"""The codecs, with parameters, that ``test_laws.py`` holds against the laws. Imports nothing that compiles."""

from __future__ import annotations

import os

CODECS = os.environ.get("LAWS_FOR", "").split() or [  # texts of codecs under development can take the place of psgc's own
    "none", "bf16", "fp16", "int8", "int8:ef=0", "onebit", "onebit:ef=0", "topk", "topk:k=0.3", "topk:k=5", "topk:ef=0,k=0.1",
    "int4", "int4:ef=0", "fp8", "fp8:ef=0", "fp8:format=e5m2", "dithering", "dithering:k=1", "dithering:k=1,normalize=l2", "dithering:ef=1,k=100",
    "int4:rotate=1", "int4:ef=0,rotate=1", "int8:rotate=1",
    "topk:select=sampled", "topk:k=0.3,select=sampled", "topk:select=mstopk", "topk:k=0.9,select=mstopk", "topk:ef=0,select=sampled",
    "blocktopk", "blocktopk:block=100,k=0.3", "blocktopk:block=5000,k=0.5", "randomk", "randomk:k=0.3", "randomk:k=5,ef=0",
    "dithering:partition=natural", "dithering:k=1,partition=natural", "dithering:k=127,normalize=l2,partition=natural",
    "dithering:ef=1,k=4,partition=natural", "dithering:ef=1,k=20,partition=natural", "tbq", "tbq:tau=0.7", "onebit:ef=0,scale=unit",
]  # fmt: skip
