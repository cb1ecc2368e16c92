"""Many parts in one launch: a table of where each one's tensors are, and which part each program works on.

Gradients arrive as hundreds of small tensors, for each of which a launch takes longer than its work. Tables are kept for as long as the same tensors come, so
that a step in which nothing has moved copies nothing to the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.cuda.common.checks import check_part, check_payload, check_status
from psgc.cuda.common.device_codec import Encoding

FIELDS: Final = (
    7  # of a part, int64: the addresses of grad, residual (0: none), out and status; elements; its first program; the payload's bytes
)
_KEPT_TABLES: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts that one launch encodes: gradients of one dtype, all with a residual or all without.

    table: int64 [parts, FIELDS]. owners: int32 [programs], each program's part. words: int64 [parts, 3], each part's random stream, or None.
    """

    table: torch.Tensor
    owners: torch.Tensor
    words: torch.Tensor | None
    dtype: torch.dtype
    feedback: bool
    rescale: float | torch.Tensor
    aligned: bool  # every gradient and residual begins at a multiple of 16 bytes


class Tables:
    """A codec's tables."""

    def __init__(self, codec: Codec, programs: Callable[[int], int], words: Callable[[Stream], tuple[int, int, int]] | None) -> None:
        """programs: how many a part of so many elements takes. words: what the codec draws from of a stream, or None if it draws nothing."""
        self._codec, self._programs, self._words = codec, programs, words
        self._kept: OrderedDict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def batches(self, items: Sequence[Encoding]) -> Iterator[Batch]:
        """The items, grouped by what a launch has one of. Streams are ``Stream`` where the codec draws. Raises CodecError for a tensor that does not fit."""
        groups: dict[tuple[object, ...], list[Encoding]] = {}
        for item in items:
            numel, device = item.grad.numel(), item.out.device
            check_part(self._codec, device, numel, grad=item.grad, residual=item.residual)
            check_payload(self._codec, device, numel, item.out, "out")
            check_status(self._codec, device, item.status)
            factor = id(item.rescale) if isinstance(item.rescale, torch.Tensor) else float(item.rescale)
            if numel:
                groups.setdefault((device, item.grad.dtype, item.residual is None, factor), []).append(item)
        for group in groups.values():
            yield self._batch(group)

    def _batch(self, items: Sequence[Encoding]) -> Batch:
        rows, first = [], 0
        for item in items:
            numel = item.grad.numel()
            old = 0 if item.residual is None else item.residual.data_ptr()
            places = (item.grad.data_ptr(), old, item.out.data_ptr(), item.status.data_ptr())
            rows.append((*places, numel, first, self._codec.payload_bound(numel)))
            first += self._programs(numel)
        device, key = items[0].out.device, tuple(number for row in rows for number in row)
        found = self._kept.pop(key, None) or self._tables(rows, device)
        self._kept[key] = found
        if len(self._kept) > _KEPT_TABLES:
            self._kept.popitem(last=False)
        words = None
        if self._words is not None:
            numbers = [self._words(item.stream) for item in items if isinstance(item.stream, Stream)]
            words = _on(device, torch.tensor(numbers, dtype=torch.int64))
        aligned = not any((row[0] | row[1]) % 16 for row in rows)
        return Batch(*found, words, items[0].grad.dtype, items[0].residual is not None, items[0].rescale, aligned)

    def _tables(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([self._programs(row[4]) for row in rows])
        owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts)
        return _on(device, torch.tensor(rows, dtype=torch.int64)), _on(device, owners)


def _on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """A copy on the device, which does not wait for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
