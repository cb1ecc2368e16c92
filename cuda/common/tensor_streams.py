"""Counter-based random numbers by torch operators: the streams of ``psgc.codecs.common.streams``, number for number, on any device."""

from __future__ import annotations

from typing import Final

import torch

_WORD: Final = 0xFFFFFFFF


def uniform(first: int, count: int, before: int, between: int, device: torch.device) -> torch.Tensor:
    """Uniform multiples of 2**-24 in [0, 1), float32 [count], from number ``first`` of the stream that has these keys on. Numbers are held as int64: torch
    computes little in uint32."""
    h = (torch.arange(first, first + count, device=device) + before) & _WORD
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = ((h ^ between ^ (h >> 15)) * 0x846CA68B) & _WORD
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2.0**-24
