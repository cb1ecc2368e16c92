"""Counter-based random numbers by torch operators: the streams of ``psgc.codecs.common.streams``, number for number, on any device."""

from __future__ import annotations

from typing import Final

import torch

from psgc.codecs.codec import Stream
from psgc.codecs.common.streams import splitmix

_WORD: Final = 0xFFFFFFFF


def uniform(first: int, count: int, before: int, between: int, device: torch.device) -> torch.Tensor:
    """Uniform multiples of 2**-24 in [0, 1), float32 [count], from number ``first`` of the stream that has these keys on. Numbers are held as int64: torch
    computes little in uint32."""
    h = hashed(torch.arange(first, first + count, device=device), before, between)
    return (h >> 8).float() * 2.0**-24


def uniform_rows(words: torch.Tensor, count: int) -> torch.Tensor:
    """``uniform`` of several streams, [streams, count]. words: int64 [streams, 3] on the device, each stream's ``first``, ``before`` and ``between``."""
    first, before, between = (words[:, column : column + 1] for column in range(3))
    return (hashed(first + torch.arange(count, device=words.device), before, between) >> 8).float() * 2.0**-24


def hashed(index: torch.Tensor, before: int | torch.Tensor, between: int | torch.Tensor) -> torch.Tensor:
    """32 random bits for each index (int64), int64."""
    h = (index + before) & _WORD
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = ((h ^ between ^ (h >> 15)) * 0x846CA68B) & _WORD
    return h ^ (h >> 16)


def write_words(stream: Stream, step: torch.Tensor, words: torch.Tensor) -> None:
    """words (int64 [3], of a ``DeviceStream``) <- the stream's numbers at the step that ``step`` (int64 [1]) holds; ``stream.step`` is not used.

    Both are on one device, which the host does not wait for: a graph that captured this draws, in each replay, for the step that it finds there."""
    state = splitmix(stream.seed)
    keys = _splitmix(step ^ _signed(state))
    for part in (stream.rank, stream.layout << 32 | stream.bucket):
        keys = _splitmix(keys ^ _signed(part))
    words[0:1].fill_(stream.first & _WORD)
    words[1:2].copy_(keys & _WORD)
    words[2:3].copy_((keys >> 32) & _WORD)


def _splitmix(state: torch.Tensor) -> torch.Tensor:
    """``splitmix`` of int64 numbers, which wrap around; torch shifts the sign in, which the masks take out again."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ ((state >> 30) & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ ((state >> 27) & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return state ^ ((state >> 31) & (1 << 33) - 1)


def _signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number
