"""Where compiled kernels are kept. Loads no compiler, so that launchers can look."""

from __future__ import annotations

import os
from pathlib import Path


def kernel_folders(beside: Path) -> tuple[Path, ...]:
    """The folders that are searched for kernels, the preferred one for new kernels first: beside the package, and among the user's caches. A user without a
    home (no HOME, and none in /etc/passwd) has none: a path with "~" in it would be a folder of that name in the current one."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folders = (beside, *((caches / "psgc",) if caches.is_absolute() else ()))
    return tuple(folder / "psgc-kernels" for folder in folders)
