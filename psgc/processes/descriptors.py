"""The number of descriptors that this process may have open: as many as it may ask for, not the 1024 that a shell starts with."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> None:
    """Raise the soft limit to the hard one, if that is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
