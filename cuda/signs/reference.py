"""The payloads of `onebit` in plain torch on any device: the definition that the kernels beside it are held against."""

from __future__ import annotations

from typing import Final

import torch

from psgc.codecs.codec import BLOCK

_LANES: Final = 64
_MAX_F32: Final = torch.finfo(torch.float32).max
_SHRINK: Final = 2.0**-13


def reference_scales(p: torch.Tensor) -> torch.Tensor:
    """mean |p| of each block, in 64 lanes; 0 of a block with NaN or infinity."""
    blocks = -(-p.numel() // BLOCK)
    sizes = torch.nn.functional.pad(p.abs(), (0, blocks * BLOCK - p.numel())).reshape(blocks, BLOCK)
    counts = torch.full((blocks,), float(BLOCK), device=p.device)
    counts[-1] = p.numel() - (blocks - 1) * BLOCK
    total = _lane_sums(sizes)
    large = (_lane_sums(sizes * _SHRINK) / counts / _SHRINK).clamp(max=_MAX_F32)
    return torch.where(sizes.isfinite().all(1), torch.where(total <= _MAX_F32, total / counts, large), 0.0)


def _lane_sums(sizes: torch.Tensor) -> torch.Tensor:
    rows = sizes.reshape(len(sizes), -1, _LANES)
    lanes = torch.zeros_like(rows[:, 0])
    for row in range(rows.shape[1]):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def reference_signs(p: torch.Tensor) -> torch.Tensor:
    """The sign bits of p, uint8, 1 = p < 0, least significant first; pad bits are zero."""
    negative = torch.nn.functional.pad((p < 0).int(), (0, -p.numel() % 8)).reshape(-1, 8)
    return (negative << torch.arange(8, device=p.device)).sum(1).to(torch.uint8)


def reference_encode(p: torch.Tensor, unit: bool) -> torch.Tensor:
    """The payload, uint8; unit: with no scales."""
    return reference_signs(p) if unit else torch.cat([reference_scales(p).view(torch.uint8), reference_signs(p)])


def reference_decode(payload: torch.Tensor, numel: int, unit: bool) -> torch.Tensor:
    """The elements, float32 [numel]."""
    place = 0 if unit else 4 * -(-numel // BLOCK)
    negative = ((payload[place:, None].int() >> torch.arange(8, device=payload.device)) & 1).reshape(-1)[:numel] == 1
    scales = torch.ones(numel) if unit else payload[:place].clone().view(torch.float32).repeat_interleave(BLOCK)[:numel]
    return torch.where(negative, -scales, scales)
