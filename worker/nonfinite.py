"""Where an array holds a NaN or infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def first_nonfinite(array: NDArray[Any], dtype: str) -> int | None:
    """The first element that is NaN or infinite; None if there is none. dtype: the elements' (bfloat16 may be uint16 bits)."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        bad = (array & 0x7F80) == 0x7F80
    elif array.dtype.kind == "f":
        bad = ~np.isfinite(array)
    else:
        return None
    return int(bad.argmax()) if bad.any() else None
