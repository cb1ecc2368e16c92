"""``--as-byteps``: makes a command's Python processes import psgc under the name ``byteps``, so that scripts written for BytePS run unchanged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psgc

FOLDER: Final = Path(psgc.__file__).parent / "compat"


def found_as_byteps(env: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH, so that ``byteps`` is found in psgc before it is found where BytePS itself may be installed."""
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != str(FOLDER)]
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *folders])}
