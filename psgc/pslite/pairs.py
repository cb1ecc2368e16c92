"""Keys and values as ps-lite sends them: up to three data frames, and their division among servers by the keys' ranges. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import RemoteProtocolError, UsageError
from psgc.pslite.meta import INT32, OTHER, UINT64, Meta

MAX_KEYS: Final = 1 << 16  # in one message
Bytes = bytes | bytearray | memoryview
NO_BYTES: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class KVPairs:
    """keys: ascending, each once. vals: their values, one after the other. lens: bytes of each value; nothing where all are of one length."""

    keys: tuple[int, ...] = ()
    vals: memoryview = NO_BYTES
    lens: tuple[int, ...] = ()

    def frames(self) -> tuple[list[Any], tuple[int, ...]]:
        """The data frames, and their types."""
        if not self.keys:
            return [], ()
        frames: list[Any] = [np.array(self.keys, "<u8").tobytes(), self.vals]
        if not self.lens:
            return frames, (UINT64, OTHER)
        return [*frames, np.array(self.lens, "<i4").tobytes()], (UINT64, OTHER, INT32)

    @classmethod
    def of_frames(cls, frames: Sequence[memoryview]) -> KVPairs:
        """Raises RemoteProtocolError for frames that hold no keys and values."""
        if not frames:
            return cls()
        if len(frames) not in (2, 3) or len(frames[0]) % 8 or not 0 < len(frames[0]) <= 8 * MAX_KEYS:
            raise RemoteProtocolError(
                f"{len(frames)} data frames of {[len(frame) for frame in frames][:4]} bytes; expected 1 to {MAX_KEYS} keys of 8 bytes, values, and lengths"
            )
        keys = tuple(np.frombuffer(frames[0], "<u8").tolist())
        lens = _ints(frames[2]) if len(frames) == 3 else ()
        if len(frames) == 3 and (len(lens) != len(keys) or min(lens) < 0):
            raise RemoteProtocolError(f"{len(keys)} keys, but lengths {list(lens)[:8]}; expected one length for each key, none negative")
        return cls(keys, frames[1], lens)

    def value(self, index: int = 0) -> memoryview:
        """The bytes of one key. Raises RemoteProtocolError if the lengths and the values do not fit."""
        if self.lens:
            if sum(self.lens) != len(self.vals):
                raise RemoteProtocolError(f"values of {len(self.vals)} bytes with lengths that add up to {sum(self.lens)}")
            start = sum(self.lens[:index])
            return self.vals[start : start + self.lens[index]]
        if len(self.vals) % len(self.keys):
            raise RemoteProtocolError(f"values of {len(self.vals)} bytes for {len(self.keys)} keys of equal length")
        size = len(self.vals) // len(self.keys)
        return self.vals[size * index : size * (index + 1)]


def _ints(frame: memoryview) -> tuple[int, ...]:
    if len(frame) % 4:
        raise RemoteProtocolError(f"lengths of {len(frame)} bytes; expected 4 for each key")
    values: NDArray[np.int32] = np.frombuffer(frame, "<i4")
    return tuple(values.tolist())


@dataclass(frozen=True, slots=True)
class KVMeta:
    """The description of a request that a server gets. The last four fields are returned in its reply."""

    cmd: int
    push: bool
    sender: int
    timestamp: int
    customer_id: int
    echoed: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))  # key, addr, val_len, option

    @classmethod
    def of(cls, sender: int, meta: Meta) -> KVMeta:
        return cls(meta.head, meta.push, sender, meta.timestamp, meta.customer_id, (meta.key, meta.addr, meta.val_len, meta.option))


def slice_by_server(pairs: KVPairs, ranges: Sequence[range]) -> list[tuple[int, KVPairs]]:
    """The data for each server, by its rank; servers without a key are left out. Raises UsageError for keys that are not ascending, or values that
    do not fit them."""
    keys = pairs.keys
    if any(a >= b for a, b in itertools.pairwise(keys)):
        raise UsageError(f"keys {list(keys)[:8]}: expected ascending keys, each once")
    if keys and not ranges[0].start <= keys[0] <= keys[-1] < ranges[-1].stop:
        raise UsageError(f"keys {list(keys)[:8]}: expected keys of {ranges[0].start} to {ranges[-1].stop - 1}")
    if pairs.lens and (len(pairs.lens) != len(keys) or (len(pairs.vals) and sum(pairs.lens) != len(pairs.vals))):
        raise UsageError(f"{len(keys)} keys and {len(pairs.vals)} bytes of values with lengths {list(pairs.lens)[:8]}: they do not fit")
    if not pairs.lens and keys and len(pairs.vals) % len(keys):
        raise UsageError(f"{len(pairs.vals)} bytes of values for {len(keys)} keys: expected a multiple, or a length for each key")
    found, first, start = [], 0, 0
    for rank, server_range in enumerate(ranges):
        last = first
        while last < len(keys) and keys[last] < server_range.stop:
            last += 1
        if last > first:
            lens = pairs.lens[first:last]
            size = (sum(lens) if lens else len(pairs.vals) // len(keys) * (last - first)) if len(pairs.vals) else 0
            found.append((rank, KVPairs(keys[first:last], pairs.vals[start : start + size], lens)))
            start += size
        first = last
    return found
