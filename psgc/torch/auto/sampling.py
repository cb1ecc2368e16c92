"""Stretches of one step's gradients, and the relative error that a codec has on them.

They are taken as backward makes gradients ready, before they are sent: of the means that come back, much is what codecs can represent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
import torch

from psgc.codecs import parse_codec
from psgc.codecs.codec import F32, Stream
from psgc.codecs.common.loss import decoded

MOST: Final = 1 << 18  # elements of all stretches together, about
LEAST: Final = 1 << 10  # of a stretch, unless the tensor has fewer
STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)


class GradientSample:
    """total: elements of all gradients."""

    def __init__(self, total: int) -> None:
        self._share = min(1.0, MOST / max(1, total))
        self._stretches: dict[str, tuple[torch.Tensor, int]] = {}  # and the whole gradient's elements

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Copy a stretch from the gradient's middle. Of several backwards in a step the last counts. Runs in autograd's thread."""
        if gradient.is_sparse or not gradient.is_floating_point() or not gradient.numel():
            return
        flat = gradient.detach().reshape(-1)
        taken = min(flat.numel(), max(LEAST, round(flat.numel() * self._share)))
        begin = (flat.numel() - taken) // 2
        self._stretches[name] = flat[begin : begin + taken].float().clone(), flat.numel()

    def relative_error(self, codec: str, names: Collection[str] | None = None) -> float | None:
        """The root mean square, over elements, of the tensors' ||decoded - gradient|| / ||gradient||, of one encoding without feedback. The stretches are
        encoded side by side, as tensors in a bucket are. names: of the tensors that count; None: all. Each counts by itself, because optimizers as Adam
        scale each by itself. None where nothing can be said: no gradients, zeros, or values that are not finite, before or after."""
        chosen = [(stretch, numel) for name, (stretch, numel) in self._stretches.items() if names is None or name in names]
        if not chosen:
            return None
        values: F32 = torch.cat([stretch for stretch, _ in chosen]).cpu().numpy()
        found = decoded(parse_codec(codec), values, STREAM)
        if not (np.isfinite(values).all() and np.isfinite(found).all()):
            return None
        exact = values.astype(np.float64)
        difference = found - exact
        end, square, elements = 0, 0.0, 0
        for stretch, numel in chosen:
            part = slice(end, end := end + stretch.numel())
            norm = float(np.linalg.norm(exact[part]))
            if norm:
                square += numel * (float(np.linalg.norm(difference[part])) / norm) ** 2
                elements += numel
        return math.sqrt(square / elements) if elements else None
