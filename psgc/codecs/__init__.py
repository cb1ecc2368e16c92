"""Codecs: encodings of gradients, one file an algorithm. ``codec.py`` has the interface and the registry."""

from psgc.codecs.codec import BLOCK, Codec, CodecPair, Encoded, Stream, parse_codec, parse_pair, registered_codecs

__all__ = ["BLOCK", "Codec", "CodecPair", "Encoded", "Stream", "parse_codec", "parse_pair", "registered_codecs"]
