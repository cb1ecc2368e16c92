"""The GPU side of `randomk`. Of a ``DeviceStream``, ``words`` are those of ``psgc.codecs.randomk.shared_stream(stream)``, which all ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.randomk import RandomKCodec, shared_stream
from psgc.cuda.common.launching import TRITON_DTYPES, draws, launch, rescaling
from psgc.cuda.common.many import ReadingTables, Tables
from psgc.cuda.sparsify.randomk_kernels import apply_kernel, gather_kernel, read_many_kernel, scan_kernel, write_many_kernel
from psgc.cuda.sparsify.scatter_kernels import PUT, TILE
from psgc.cuda.sparsify.selection import Source
from psgc.cuda.sparsify.sparse import SparseDevice
from psgc.device.codec import Decoding, DeviceStream, Encoding, stream_words


class RandomKDevice(SparseDevice):
    """See the module's text. The payloads of a sum must have the same keys, as ``RandomKCodec.fold`` checks on the CPU: a step's payloads do."""

    first = PUT

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, RandomKCodec)
        super().__init__(codec)
        self._randomk = codec
        self._readings = ReadingTables(codec, lambda numel: -(-numel // TILE))
        self._tables = Tables(codec, lambda numel: -(-numel // TILE), lambda stream: stream_words(shared_stream(stream)))

    def encode_many(self, items: Sequence[Encoding]) -> None:
        if any(isinstance(item.stream, DeviceStream) for item in items):
            super().encode_many(items)
            return
        for batch in self._tables.batches(items):
            launch(
                write_many_kernel, batch.owners.numel(), batch.table, batch.owners, batch.words, *rescaling(batch.rescale),
                DTYPE=TRITON_DTYPES[batch.dtype], FEEDBACK=batch.feedback, ALIGNED=batch.aligned, SCALES=bool(self._randomk.settings[0]), TILE=TILE,
            )  # fmt: skip

    def decode_many(self, items: Sequence[Decoding]) -> None:
        for batch in self._readings.batches(items):
            launch(
                read_many_kernel, batch.owners.numel(), batch.table, batch.owners, *rescaling(batch.rescale), TILE=TILE, **batch.constants
            )  # fmt: skip

    def _strata(self, numel: int) -> tuple[int, int, int, int]:
        """The kernels' arguments numel, count, size and wide."""
        count = self._randomk.count(numel)
        return numel, count, numel // count, numel % count

    def _launch_write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        strata, payload_bytes = self._strata(numel), self.codec.payload_bound(numel)
        scale = numel / strata[1] if self._randomk.settings[0] else 1.0
        shared = stream if isinstance(stream, DeviceStream) else shared_stream(stream)
        launch(scan_kernel, -(-numel // TILE), *source.arguments, kept, status, numel, payload_bytes, TILE=TILE, **source.constants)
        launch(
            gather_kernel, -(-strata[1] // TILE), *source.arguments, kept, _numbers(out, payload_bytes), *draws(shared), *strata, scale,
            TILE=TILE, **source.constants,
        )  # fmt: skip

    def _launch_apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        strata = self._strata(numel)
        numbers = _numbers(payload, self.codec.payload_bound(numel))
        launch(apply_kernel, -(-strata[1] // TILE), numbers, out, *strata, MODE=mode, TILE=TILE)


def _numbers(payload: torch.Tensor, payload_bytes: int) -> torch.Tensor:
    return payload[:payload_bytes].view(torch.int32)
