"""Machinery that several codecs share."""
