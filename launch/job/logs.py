"""Logging for processes that psgc starts: one format, to stderr."""

from __future__ import annotations

import logging
import sys


def set_up_logging(level: str) -> None:
    """Send records of at least ``level`` to stderr, one line each."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="%(levelname).1s %(asctime)s %(name)s: %(message)s", force=True)
