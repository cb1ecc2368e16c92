"""A slice's payload on the device, and how the host takes it: status first, then as many bytes as that says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from psgc.codecs.codec import Encoded
from psgc.errors import DeviceError
from psgc.torch.device.runtime import Event
from psgc.worker.device import Bytes

STATUS_BYTES: Final = 16  # in front of a payload on the device, and copied down with it: int64 [2], see DeviceCodec


@dataclass(slots=True, eq=False)
class Sent:
    """A slice's payload on the device behind its status; its bytes, once they are known; and when it has been copied down. status, room: of the memory."""

    memory: torch.Tensor
    length: int = 0
    copied: Event | None = None
    status: torch.Tensor = field(init=False)
    room: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.status, self.room = self.memory[:STATUS_BYTES].view(torch.int64), self.memory[STATUS_BYTES:]

    @property
    def payload(self) -> torch.Tensor:
        return self.room[: self.length]


class Taking:
    """Takes a payload's pieces as they arrive on the host."""

    def __init__(self, sent: Sent, out: Bytes) -> None:
        self._sent, self._out = sent, out
        self.encoded: Encoded | DeviceError = DeviceError("no payload has come")

    def take(self, first: int, piece: Bytes) -> None:
        if first == 0:
            flags, count = (int(each) for each in piece[:STATUS_BYTES].view(np.int64))
            if not 0 <= count <= self._out.size:
                self.encoded = DeviceError(f"a kernel has told of a payload of {count} bytes, where {self._out.size} are possible")
                return
            self._sent.length, self.encoded = count, Encoded(count, bool(flags & 1))
            first, piece = STATUS_BYTES, piece[STATUS_BYTES:]
        begin = first - STATUS_BYTES
        count = min(piece.size, self._sent.length - begin)
        if count > 0:
            self._out[begin : begin + count] = piece[:count]
