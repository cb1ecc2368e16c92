"""Tensors -> buckets -> parts -> keys: how declared tensors are fused and cut, and which server holds each part.

Pure. The scheduler builds a Layout from the ranks' declarations; workers and servers get it as JSON and build the same object.
"""

from psgc.layout.agreement import compare
from psgc.layout.building import MIN_PART_PAYLOAD_BYTES, build_layout, equal_parts, full_parts, part_numel
from psgc.layout.machines import Machines
from psgc.layout.placement import balanced_servers
from psgc.layout.records import (
    ITEM_BYTES,
    MAX_LAYOUTS,
    MAX_PRIORITY,
    OF_MODELS,
    Bucket,
    BucketSpec,
    Declaration,
    Layout,
    Part,
    TensorSpec,
    key_text,
    make_key,
)  # fmt: skip

__all__ = [
    "ITEM_BYTES",
    "MAX_LAYOUTS",
    "MAX_PRIORITY",
    "MIN_PART_PAYLOAD_BYTES",
    "OF_MODELS",
    "Bucket",
    "BucketSpec",
    "Declaration",
    "Layout",
    "Machines",
    "Part",
    "TensorSpec",
    "balanced_servers",
    "build_layout",
    "compare",
    "equal_parts",
    "full_parts",
    "key_text",
    "make_key",
    "part_numel",
]
