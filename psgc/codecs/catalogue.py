"""What codecs there are and what they save: the table of ``psgc codecs``.

Owns no figure: sizes come from payloads of a 4 MiB part of fp32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psgc.codecs.codec import Codec, Stream, parse_codec, registered_codecs

PART: Final = 1 << 20  # elements of a 4 MiB fp32 part


def catalogue() -> list[dict[str, Any]]:
    """One entry a registered codec, at its default parameters."""
    return [_entry(parse_codec(name)) for name in registered_codecs()]


def _entry(codec: Codec) -> dict[str, Any]:
    payload_bytes = gaussian_payload_bytes(codec, PART)
    return {
        "name": codec.name,
        "canonical": codec.canonical,
        "parameters": dict(codec.defaults),
        "ratio_fp32": round(4 * PART / payload_bytes, 3),
        "ratio_bf16": round(2 * PART / payload_bytes, 3),
        "unbiased": codec.unbiased,
        "feedback": codec.feedback,
        "additive": codec.additive,
    }


def gaussian_payload_bytes(codec: Codec, numel: int) -> int:
    """Length of the payload of one part of Gaussian values, encoded."""
    values = np.random.default_rng(0).standard_normal(numel, np.float32)
    out = np.empty(codec.payload_bound(numel), np.uint8)
    return codec.encode(values, None, 1.0, Stream(0, 0, 0, 0), out).payload_bytes
