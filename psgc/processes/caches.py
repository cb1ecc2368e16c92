"""Where compiled kernels are kept. Loads no compiler, so that launchers can look."""

from __future__ import annotations

from pathlib import Path


def kernel_folders(beside: Path, of_user: Path) -> tuple[Path, ...]:
    """The folders that are searched for kernels, the preferred one for new kernels first: beside the package, and psgc's among the user's caches. A user
    without a home (no HOME, and none in /etc/passwd) has none: ``~`` stays as it is then, and would be a folder of that name in the current one."""
    folders = (beside, of_user) if of_user.is_absolute() else (beside,)
    return tuple(folder / "psgc-kernels" for folder in folders)
