"""What the GPU side of a codec is; ``psgc.codecs.backends`` finds it for a codec and a device.

A ``DeviceCodec`` does on a GPU what its ``Codec`` does on the CPU, for a whole part at a time, and writes the same bytes.

* Every call only enqueues work on torch's current stream of the tensors' device: it does not synchronise with the host, reads nothing back, and
  allocates nothing whose size depends on data. It can be captured in a CUDA graph.
* Tensors are flat, contiguous and on one device. A payload is uint8 and begins at a multiple of 16 bytes. ``numel`` is 1 or more; of an
  empty part nothing is launched, and sparse codecs refuse it, as on the CPU.
* ``rescale`` is a float, or a float32 tensor of one element on the device, for graphs whose replays differ in it.
* ``stream`` is a ``Stream``, or a ``DeviceStream``, whose numbers are read from the device, for graphs whose replays differ in the step.
* ``status`` is int64 [2] on the device, set to 0 by the caller. Bit 0 of ``status[0]`` is set if an input, or the sum, is NaN or infinite (never
  cleared). ``status[1]`` becomes the payload's length in bytes.
* ``scratch`` is uint8, of ``scratch_bytes(numel)`` bytes or more, at a multiple of 16 bytes; None where that is 0. Its content need not be kept.
* A tensor of a wrong device, dtype or length raises CodecError, which names the tensor.

Owns the interface, and how many bytes each operation has to move. Knows no kernel, and does not import triton.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.common.streams import stream_position

Use = Literal["decode", "add", "commit"]
Operation = Literal["encode", "decode", "commit", "fold", "finish", "fold_and_finish"]


@dataclass(frozen=True, slots=True)
class DeviceStream:
    """A random stream whose numbers lie on the device. words: int64 [3], what ``stream_words`` gives."""

    words: torch.Tensor


def stream_words(stream: Stream) -> tuple[int, int, int]:
    """What kernels draw from: the index of the part's first element in the stream, modulo 2**32, and the stream's two keys."""
    return stream_position(stream, 0)


@dataclass(frozen=True, slots=True)
class Encoding:
    """The arguments of one ``encode`` among many."""

    grad: torch.Tensor
    residual: torch.Tensor | None
    rescale: float | torch.Tensor
    stream: Stream | DeviceStream
    out: torch.Tensor
    status: torch.Tensor
    scratch: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """What becomes of the left-to-right sum of 1 to 8 payloads, one use among many.

    decode: ``target`` becomes it, as by ``decode`` or, of several payloads, by ``fold``. add: it is added to ``target``, as by ``fold``. commit: ``target``, a
    residual, becomes what the one payload of ``grad`` left out, as by ``commit``."""

    payloads: Sequence[torch.Tensor]
    numel: int
    target: torch.Tensor
    use: Use = "decode"
    grad: torch.Tensor | None = None
    rescale: float | torch.Tensor = 1.0


class DeviceCodec(ABC):
    """The GPU side of one codec instance. Immutable; may be shared between threads."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def scratch_bytes(self, numel: int) -> int:
        """Bytes of device memory that ``encode``, ``finish`` and ``fold_and_finish`` need besides their arguments."""
        return 0

    @abstractmethod
    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the payload of ``grad + rescale * residual`` to ``out``, whose length is at least ``codec.payload_bound``.

        grad: float32, bfloat16 or float16 (``none``: the part's dtype), not modified. residual: float32, not modified; None without feedback."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        """``out`` (float32, bfloat16 or float16; ``none``: the part's dtype) becomes the part's elements, rounded to nearest even where it has 16 bits."""

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        """``residual <- grad + rescale * residual - decode(payload)``. Codecs without feedback never see it."""
        raise NotImplementedError(f"{self.codec.name} keeps no residual")

    @abstractmethod
    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        """``acc`` (of the codec's ``acc_dtype``) becomes the left-to-right sum of 1 to 8 payloads (``fresh``: of them alone, else added, as one sum, to
        what ``acc`` holds)."""

    @abstractmethod
    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Encode ``p = acc / divisor + rescale * residual`` to ``out``, and write ``p - decode(out)`` to ``residual_out``. May overwrite ``acc``.
        ``residual`` and ``residual_out`` are both None for a codec without feedback, and never the same memory."""

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[torch.Tensor], numel: int, divisor: int, residual: torch.Tensor | None,
        residual_out: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        """Do what ``fold`` of the push codec's GPU side (of 1 to 8 payloads, fresh) and ``finish`` do, without an ``acc`` of the caller's: in one pass, but
        that sparse payloads are added up in memory first. Returns False, and does nothing, where this codec cannot read the push codec's payloads."""
        return False

    def encode_many(self, items: Sequence[Encoding]) -> None:
        """Encode many parts: one launch where the codec has a kernel for it, else one by one."""
        for item in items:
            self.encode(item.grad, item.residual, item.rescale, item.stream, item.out, item.status, item.scratch)

    def decode_many(self, items: Sequence[Decoding]) -> None:
        """Use many parts' payloads, of which none reads or writes what another writes: one launch where the codec has a kernel for it, else one by one."""
        for item in items:
            self.decode_one(item)

    def decode_one(self, item: Decoding) -> None:
        """Use one part's payloads, by the operation of its own."""
        if item.use == "commit":
            assert item.grad is not None and len(item.payloads) == 1, "a residual is committed from one payload of a gradient"
            self.commit(item.payloads[0], item.numel, item.grad, item.target, item.rescale)
        elif item.use == "decode" and len(item.payloads) == 1:
            self.decode(item.payloads[0], item.numel, item.target)
        else:
            self.fold(item.payloads, item.numel, item.target, item.use == "decode")

    def moved_bytes(self, operation: Operation, numel: int, item_bytes: int = 4, payloads: int = 1) -> int:
        """The fewest bytes that an operation reads and writes in device memory, each input and each output counted once. item_bytes: of an element of
        ``grad`` or, for decode, of ``out``. payloads: how many are folded. A sum that is folded into is counted as ``fresh``."""
        payload, residual = self.codec.payload_bound(numel), 4 * numel if self.codec.feedback else 0
        return {
            "encode": item_bytes * numel + residual + payload,
            "decode": payload + item_bytes * numel,
            "commit": payload + item_bytes * numel + 2 * residual,
            "fold": payloads * payload + 4 * numel,
            "finish": 4 * numel + 2 * residual + payload,
            "fold_and_finish": payloads * payload + 2 * residual + payload,
        }[operation]
