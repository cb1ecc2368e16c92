"""What codecs there are and what they save: the table of ``psgc codecs``.

Owns no figure: sizes come from payloads of a 4 MiB part of fp32, for a scheme of several rounds from the mean of both ways.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psgc.codecs.codec import Codec, Stream, parse_codec, registered_codecs
from psgc.codecs.foreign import foreign_codecs
from psgc.codecs.scheme import Scheme, Setting, parse_scheme, registered_schemes

PART: Final = 1 << 20  # elements of a 4 MiB fp32 part


def catalogue() -> list[dict[str, Any]]:
    """One entry a codec or scheme, at its default parameters; those of other packages say from which distribution they are. Low rank is
    that of a matrix of 1024 x 1024."""
    setting = Setting(shapes=((1024, PART // 1024),))
    schemes = [_scheme_entry(name, parse_scheme(name, setting)) for name in registered_schemes()]
    others = [_entry(parse_codec(name)) | {"distribution": package} for name, package in foreign_codecs().items()]
    return [_entry(parse_codec(name)) for name in registered_codecs()] + schemes + others


def _scheme_entry(name: str, scheme: Scheme) -> dict[str, Any]:
    rounds = scheme.rounds(PART)
    both_ways = scheme.push_bound(PART) + sum(round_.pair.pull.payload_bound(round_.numel) for round_ in rounds)
    return {
        "name": name,
        "canonical": scheme.canonical,
        "parameters": dict(scheme.defaults),
        "ratio_fp32": round(8 * PART / both_ways, 3),
        "ratio_bf16": round(4 * PART / both_ways, 3),
        "unbiased": False,
        "feedback": scheme.feedback,
        "additive": True,
    }


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
