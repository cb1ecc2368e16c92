"""The GPU side of codecs of codes in blocks with a scale: `int8`, `int4`, `fp8`, `dithering` and `tbq`, with and without feedback and rotation.

Every operation is one pass: each input is read once, each output written once, whatever the codec. That holds for the fused server pass, too: sums of payloads,
the mean, what is left out and the answer stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import torch

from psgc.codecs.codec import Codec
from psgc.codecs.quantize.blocks import BlockCodec
from psgc.codecs.quantize.rotation import GROUP
from psgc.codecs.tbq import TbqCodec
from psgc.cuda.common.dense import DenseDevice, Written
from psgc.cuda.common.launching import TRITON_DTYPES, draws, launch, rescaling
from psgc.cuda.common.many import Reading, ReadingTables, Tables
from psgc.cuda.quantize import block_kernels as kernels
from psgc.cuda.quantize import code_kernels as codes
from psgc.device.codec import DeviceCodec, DeviceStream, Encoding, stream_words

TILE: Final = 2048  # elements a program: 16 a thread


class Codes(NamedTuple):
    """Helpers of ``code_kernels``."""

    code: Any
    value: Any


INTEGERS: Final = Codes(codes.integer_code, codes.integer_value)
NATURAL: Final = Codes(codes.natural_code, codes.natural_value)
THRESHOLD: Final = Codes(codes.threshold_code, codes.integer_value)
FLOAT8: Final = {"e4m3": Codes(codes.e4m3_code, codes.e4m3_value), "e5m2": Codes(codes.e5m2_code, codes.e5m2_value)}


class BlockDeviceCodec(DenseDevice):
    """A codec whose payload is as ``psgc.codecs.quantize.blocks`` says."""

    def __init__(self, codec: Codec, helpers: Codes) -> None:
        super().__init__(codec)
        block = cast("BlockCodec", codec)
        rotates, fixed = codec.parameters.get("rotate") == "1", isinstance(codec, TbqCodec)
        self._tile = GROUP if rotates else TILE // 2 if block.norm == "l2" else TILE  # l2 norms take registers
        self._limits = tuple(float(setting) for setting in block.settings[:2])
        self._fixed = float(block.settings[2]) if fixed else 0.0
        self._draws = not codec.feedback
        self._reading = {
            "VALUE": helpers.value, "BITS": block.bits, "BLOCK": block.block, "ROWS": self._tile // block.block, "ROTATE": rotates,
        }  # fmt: skip
        norm = kernels.FIXED if fixed else kernels.L2_NORM if block.norm == "l2" else kernels.MAX_NORM
        self._writing = {**self._reading, "CODE": helpers.code, "RANDOM": self._draws, "NORM": norm.value}
        self._tables = Tables(codec, lambda numel: -(-numel // self._tile), stream_words if self._draws else None)
        self._readings = ReadingTables(codec, lambda numel: -(-numel // self._tile))

    def encode_many(self, items: Sequence[Encoding]) -> None:
        if self._draws and any(isinstance(item.stream, DeviceStream) for item in items):
            super().encode_many(items)
            return
        for batch in self._tables.batches(items):
            launch(
                kernels.write_many_kernel, batch.owners.numel(), batch.table, batch.owners, batch.words, *rescaling(batch.rescale), *self._limits,
                self._fixed, DTYPE=TRITON_DTYPES[batch.dtype], FEEDBACK=batch.feedback, ALIGNED=batch.aligned, **self._writing,
            )  # fmt: skip

    def _launch_write(self, what: Written, out: torch.Tensor, status: torch.Tensor) -> None:
        numel = what.numel
        launch(
            kernels.write_kernel, -(-numel // self._tile), what.sources, float(what.divisor), what.residual, *rescaling(what.rescale), what.kept, out,
            status, numel, self.codec.payload_bound(numel), *draws(what.stream if self._draws else None), *self._limits, self._fixed,
            COUNT=what.added, DIVIDES=what.divisor != 1, **self._writing,
        )  # fmt: skip

    def _read(
        self, payloads: tuple[torch.Tensor, ...], numel: int, target: torch.Tensor, grad: torch.Tensor | None, rescale: float | torch.Tensor,
        use: int,
    ) -> None:  # fmt: skip
        launch(
            kernels.read_kernel, -(-numel // self._tile), payloads, target, grad, *rescaling(rescale), numel, *self._limits,
            USE=use, COUNT=len(payloads), **self._reading,
        )  # fmt: skip

    def _read_many(self, batch: Reading) -> None:
        launch(
            kernels.read_many_kernel, batch.owners.numel(), batch.table, batch.owners, *rescaling(batch.rescale), *self._limits,
            **batch.constants, **self._reading,
        )  # fmt: skip


def integer_side(codec: Codec) -> DeviceCodec:
    """The GPU side of `int8`, `int4` and linear `dithering`."""
    return BlockDeviceCodec(codec, INTEGERS)


def natural_side(codec: Codec) -> DeviceCodec:
    """The GPU side of `dithering` with ``partition=natural``."""
    return BlockDeviceCodec(codec, NATURAL)


def float8_side(codec: Codec) -> DeviceCodec:
    """The GPU side of `fp8`."""
    return BlockDeviceCodec(codec, FLOAT8[codec.parameters.get("format", "e4m3")])


def threshold_side(codec: Codec) -> DeviceCodec:
    """The GPU side of `tbq`."""
    return BlockDeviceCodec(codec, THRESHOLD)
