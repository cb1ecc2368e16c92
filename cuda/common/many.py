"""Many parts in one launch: a table of where each one's tensors are, and which part each program works on.

Gradients arrive as hundreds of small tensors, for each of which a launch takes longer than its work. Tables are kept for as long as the same tensors come, so
that a step in which nothing has moved copies nothing to the device.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.cuda.common.checks import FLOAT_DTYPES, PAYLOAD_ALIGNMENT, check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.decoded_kernels import ADDS, COMMITS, DECODES
from psgc.cuda.common.launching import TRITON_DTYPES
from psgc.device.codec import Decoding, Encoding, Use

FIELDS: Final = 8
"""Of a part, int64: the addresses of grad, residual (0: none), out and status; elements; its first program; the payload's bytes; scratch (0: none)."""
READ_FIELDS: Final = 5
"""Of a part whose payloads are used: the addresses of target and grad (0: none); elements; its first program; a payload's bytes, at the bound."""
USES: Final[dict[Use, int]] = {"decode": DECODES.value, "add": ADDS.value, "commit": COMMITS.value}
T = TypeVar("T")
_KEPT_TABLES: Final = 64
_Kept: TypeAlias = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]  # a batch's table, owners and numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts that one launch encodes: gradients of one dtype, all with a residual or all without.

    table: int64 [parts, FIELDS]. owners: int64 [programs], each program's part. numbers: int64 [parts, n], what else the codec says of parts, or None.
    words: int64 [parts, 3], each part's random stream, or None.
    """

    table: torch.Tensor
    owners: torch.Tensor
    numbers: torch.Tensor | None
    words: torch.Tensor | None
    dtype: torch.dtype
    feedback: bool
    rescale: float | torch.Tensor
    aligned: bool  # every gradient and residual begins at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """Parts whose payloads one launch uses alike.

    table: int64 [parts, READ_FIELDS + count], the fields and the addresses of the ``count`` payloads. owners: int64 [programs], each program's part.
    numbers: int64 [parts, n], what else the codec says of parts, or None. most: elements of the largest part."""

    table: torch.Tensor
    owners: torch.Tensor
    numbers: torch.Tensor | None
    most: int
    target: torch.dtype
    grad: torch.dtype | None
    use: int
    count: int
    rescale: float | torch.Tensor
    aligned: bool  # every target and gradient begins at a multiple of 16 bytes

    @property
    def constants(self) -> dict[str, Any]:
        """Of the kernels."""
        grad = None if self.grad is None else TRITON_DTYPES[self.grad]
        return {"TARGET": TRITON_DTYPES[self.target], "GRAD": grad, "USE": self.use, "COUNT": self.count, "ALIGNED": self.aligned}


class ReadingTables:
    """A codec's tables of payloads that are used together."""

    def __init__(self, codec: Codec, programs: Callable[[int], int], numbers: Callable[[int], tuple[int, ...]] | None = None) -> None:
        """programs: how many a part of so many elements takes. numbers: what the kernel is told besides of a part of so many elements."""
        self._codec, self._programs, self._numbers = codec, programs, numbers
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()
        self._sizes = sizes_of(codec, programs)

    def batches(self, items: Sequence[Decoding]) -> Iterator[Reading]:
        """The items, grouped by what a launch has one of. Raises CodecError for a tensor that does not fit."""
        groups: dict[tuple[object, ...], list[Decoding]] = {}
        for item in items:
            check_decoding(self._codec, item)
            if item.numel:
                groups.setdefault(alike(item), []).append(item)
        for group in groups.values():
            yield self._batch(group)

    def _batch(self, items: Sequence[Decoding]) -> Reading:
        rows, first, one = [], 0, items[0]
        for item in items:
            grad = 0 if item.grad is None else item.grad.data_ptr()
            payloads = [payload.data_ptr() for payload in item.payloads]
            bound, programs = self._sizes(item.numel)
            rows.append((item.target.data_ptr(), grad, item.numel, first, bound, *payloads))
            first += programs
        found = kept(self._kept, tuple(itertools.chain.from_iterable(rows)), lambda: self._made(rows, one.target.device))
        grad_dtype = one.grad.dtype if one.use == "commit" and one.grad is not None else None
        aligned = not any((row[0] | row[1]) % 16 for row in rows)
        most = max(row[2] for row in rows)
        return Reading(*found, most, one.target.dtype, grad_dtype, USES[one.use], len(one.payloads), one.rescale, aligned)

    def _made(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> _Kept:
        return _tables(rows, [row[2] for row in rows], self._programs, self._numbers, device)


class Tables:
    """A codec's tables of parts that are encoded together."""

    def __init__(
        self, codec: Codec, programs: Callable[[int], int], words: Callable[[Stream], tuple[int, int, int]] | None,
        numbers: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        """programs: how many a part of so many elements takes. words: what the codec draws from of a stream, or None if it draws nothing. numbers: what
        the kernel is told besides of a part of so many elements."""
        self._codec, self._programs, self._words, self._numbers = codec, programs, words, numbers
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()
        self._sizes = sizes_of(codec, programs)

    def batches(self, items: Sequence[Encoding]) -> Iterator[Batch]:
        """The items, grouped by what a launch has one of. Streams are ``Stream`` where the codec draws. Raises CodecError for a tensor that does not fit."""
        groups: dict[tuple[object, ...], list[Encoding]] = {}
        for item in items:
            grad, residual, device = item.grad, item.residual, item.out.device
            numel = grad.numel()
            self._check(item, device, numel)
            if numel:
                groups.setdefault((device, grad.dtype, residual is None, _factor(item.rescale)), []).append(item)
        for group in groups.values():
            yield self._batch(group)

    def _check(self, item: Encoding, device: torch.device, numel: int) -> None:
        grad, residual, out, status = item.grad, item.residual, item.out, item.status
        if (
            grad.device == device and grad.dtype in FLOAT_DTYPES and grad.is_contiguous()
            and (residual is None or (residual.device == device and residual.dtype == torch.float32 and residual.is_contiguous() and residual.numel() == numel))
            and out.dtype == torch.uint8 and out.is_contiguous() and out.numel() >= self._sizes(numel)[0] and not out.data_ptr() % PAYLOAD_ALIGNMENT
            and status.device == device and status.dtype == torch.int64 and status.is_contiguous() and status.numel() == 2
        ):  # fmt: skip
            return
        check_part(self._codec, device, numel, grad=grad, residual=residual)  # what is wrong, in words
        check_payload(self._codec, device, numel, out, "out")
        check_status(self._codec, device, status)

    def _batch(self, items: Sequence[Encoding]) -> Batch:
        rows, first = [], 0
        for item in items:
            numel = item.grad.numel()
            old = 0 if item.residual is None else item.residual.data_ptr()
            scratch = 0 if item.scratch is None else item.scratch.data_ptr()
            bound, programs = self._sizes(numel)
            rows.append((item.grad.data_ptr(), old, item.out.data_ptr(), item.status.data_ptr(), numel, first, bound, scratch))
            first += programs
        device, key = items[0].out.device, tuple(itertools.chain.from_iterable(rows))
        found = kept(self._kept, key, lambda: _tables(rows, [row[4] for row in rows], self._programs, self._numbers, device))
        words = None
        if self._words is not None:
            numbers = [self._words(item.stream) for item in items if isinstance(item.stream, Stream)]
            words = on_device(device, list(itertools.chain.from_iterable(numbers))).view(-1, 3)
        aligned = not any((row[0] | row[1]) % 16 for row in rows)
        return Batch(*found, words, items[0].grad.dtype, items[0].residual is not None, items[0].rescale, aligned)


def _tables(
    rows: Sequence[tuple[int, ...]], numels: Sequence[int], programs: Callable[[int], int], numbers: Callable[[int], tuple[int, ...]] | None,
    device: torch.device,
) -> _Kept:  # fmt: skip
    """A batch's tables on the device, of parts of so many elements: one copy for all."""
    owners = [part for part, numel in enumerate(numels) for _ in range(programs(numel))]
    others = [] if numbers is None else [numbers(numel) for numel in numels]
    whole = on_device(device, [*itertools.chain.from_iterable(rows), *owners, *itertools.chain.from_iterable(others)])
    first, last = len(rows) * len(rows[0]), len(rows) * len(rows[0]) + len(owners)
    return whole[:first].view(len(rows), -1), whole[first:last], whole[last:].view(len(rows), -1) if others else None


def sizes_of(codec: Codec, programs: Callable[[int], int]) -> Callable[[int], tuple[int, int]]:
    """What gives a part's payload_bound and its programs, which are not computed anew for each of many parts of one length."""
    return functools.lru_cache(1024)(lambda numel: (codec.payload_bound(numel), programs(numel)))


def _factor(rescale: float | torch.Tensor) -> float | int:
    """What is the same for all parts that one rescale goes with."""
    return id(rescale) if isinstance(rescale, torch.Tensor) else float(rescale)


def check_decoding(codec: Codec, item: Decoding) -> None:
    """Raise CodecError for a tensor that does not fit."""
    device = item.target.device
    name = {"decode": "out" if len(item.payloads) == 1 else "acc", "add": "acc", "commit": "residual"}[item.use]
    check_part(codec, device, item.numel, grad=item.grad, **{name: item.target})
    check_payloads(codec, device, item.numel, item.payloads)


def alike(item: Decoding) -> tuple[object, ...]:
    """What is the same of all uses of payloads that share a launch."""
    grad = item.grad.dtype if item.use == "commit" and item.grad is not None else None
    return item.target.device, item.target.dtype, grad, item.use, len(item.payloads), _factor(item.rescale)


def kept(tables: OrderedDict[tuple[int, ...], T], key: tuple[int, ...], make: Callable[[], T]) -> T:
    """The tables of these numbers, made anew if they are not among those that are kept."""
    found = tables.pop(key, None) or make()
    tables[key] = found
    if len(tables) > _KEPT_TABLES:
        tables.popitem(last=False)
    return found


def on_device(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    """Numbers on the device, int64, by a copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
