"""Codecs: encodings of gradients, one file an algorithm. ``codec.py`` has the interface and the registry."""

from psgc.codecs.codec import BLOCK, Codec, CodecPair, Encoded, Stream, parse_codec, parse_pair, registered_codecs
from psgc.codecs.scheme import ResidualDtype, Round, Scheme, Setting, Way, parse_scheme, registered_schemes

__all__ = [
    "BLOCK", "Codec", "CodecPair", "Encoded", "ResidualDtype", "Round", "Scheme", "Setting", "Stream", "Way",
    "parse_codec", "parse_pair", "parse_scheme", "registered_codecs", "registered_schemes",
]  # fmt: skip
