"""Counts that grow for as long as a job runs, in fields of 32 bits: their last bits travel, and the receiver, who knows the count nearly, finds the rest.

Pure. A thousand turns a second take 50 days to go round once.
"""

from __future__ import annotations

from typing import Final

_ROUND: Final = 1 << 32


def cut(count: int) -> int:
    """What travels of ``count``."""
    return count % _ROUND


def whole(sent: int, near: int) -> int:
    """The count that ends in ``sent`` and is less than 2**31 from ``near``; below 0 where a peer says what no count has been."""
    ahead = (sent - near) % _ROUND
    return near + (ahead if ahead < _ROUND // 2 else ahead - _ROUND)
