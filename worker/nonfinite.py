"""Where an array holds a NaN or infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.rows import RowsCodec, read_rows
from psgc.codecs.scheme import PairScheme
from psgc.layout import Bucket, Layout


def nonfinite_tensor(layout: Layout, bucket: Bucket, array: NDArray[Any]) -> str | None:
    """The name of the first tensor of a bucket with a NaN or infinity in it; None if there is none. array: the bucket's elements. Of a sparse gradient only
    this step's rows are looked at: behind them, up to the table's size, lies what an earlier sum has left."""
    scheme = layout.scheme(bucket)
    codec = scheme.pair.push if type(scheme) is PairScheme else None
    if isinstance(codec, RowsCodec):
        array = read_rows(array, codec.columns).values.reshape(-1)
    first = first_nonfinite(array, bucket.dtype)
    return None if first is None else layout.tensor_at(bucket, first)


def first_nonfinite(array: NDArray[Any], dtype: str) -> int | None:
    """The first element that is NaN or infinite; None if there is none. dtype: the elements' (bfloat16 may be uint16 bits)."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        bad = (array & 0x7F80) == 0x7F80
    elif array.dtype.kind == "f":
        bad = ~np.isfinite(array)
    else:
        return None
    return int(bad.argmax()) if bad.any() else None
