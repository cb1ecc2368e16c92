"""Whether BytePS itself is installed: then the name ``byteps`` is taken. Imports nothing of psgc: setup.py runs it, too."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def refusal(paths: Iterable[str]) -> str:
    """Why ``byteps`` cannot be psgc's where these folders are searched for packages, in a line; "" if it can."""
    for found in importlib.metadata.distributions(name="byteps", path=list(paths)):
        where = found.locate_file("")
        return (
            f"psgc-byteps: BytePS {found.version} is installed in {where}, and both are `byteps`: run `pip uninstall byteps` first, or leave "
            f"psgc-byteps out and start the script with `psgc-launch --as-byteps`"
        )
    return ""
