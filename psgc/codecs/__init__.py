"""Codecs: encodings of gradients, one file an algorithm. ``codec.py`` and ``scheme.py`` are the interfaces, ``registry.py`` knows the names."""

from psgc.codecs.codec import BLOCK, Codec, CodecPair, Encoded, Stream
from psgc.codecs.registry import parse_codec, parse_pair, parse_scheme, registered_codecs, registered_schemes
from psgc.codecs.scheme import BucketContext, ResidualDtype, Round, Scheme, SchemeState

__all__ = [
    "BLOCK", "Codec", "CodecPair", "Encoded", "ResidualDtype", "Round", "Scheme", "BucketContext", "Stream", "SchemeState",
    "parse_codec", "parse_pair", "parse_scheme", "registered_codecs", "registered_schemes",
]  # fmt: skip
