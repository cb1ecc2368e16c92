"""Machinery of codecs that send some elements: which, how many, and where they are."""
