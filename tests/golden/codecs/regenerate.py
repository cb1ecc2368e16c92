"""The recipe of the golden payloads, and their writer.

Owns the input, made by integer arithmetic alone, and what is done to it. A codec id means these bytes: if a golden file has to
change, the id has to. ``python tests/golden/codecs/regenerate.py --yes`` writes the files; tests only ever read them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psgc.codecs.codec import Stream
from psgc.codecs.registry import parse_codec

FOLDER = Path(__file__).parent
NUMEL = 4999  # more than one block of every codec, and no multiple of anything
CODECS = (
    "none", "bf16", "fp16", "int8", "int8:ef=0", "onebit", "topk", "int4", "int4:ef=0", "fp8", "fp8:ef=0", "fp8:format=e5m2", "ternary",
    "dithering", "dithering:k=1,normalize=l2", "int8:rotate=1", "int4:rotate=1",
    "topk:select=sampled", "topk:select=mstopk", "topk:k=0.99", "graddrop", "blocktopk", "randomk", "randomk:ef=0",
    "dithering:partition=natural", "dithering:ef=1,k=20,partition=natural",
    "tbq:tau=0.1", "majority", "onebit:ef=0,scale=unit",
)  # fmt: skip
STREAM = Stream(seed=11, step=5, rank=2, bucket=3, first=8192)
RESCALE = 0.75


def golden_input(salt: int) -> npt.NDArray[np.float32]:
    """Heavy-tailed values with ties, zeros of both signs, denormals and a block of zeros."""
    mixed = (np.arange(NUMEL, dtype=np.uint64) + np.uint64(salt * 7919)) * np.uint64(2654435761) % np.uint64(1 << 32)
    unit = mixed.astype(np.float64) / 2.0**31 - 1.0
    values = (unit * unit * unit).astype(np.float32)
    values[5::97] = 0.25  # ties
    values[::131] = 0.0
    values[1::131] = -0.0
    values[2::131] = 1e-41
    values[1024:1280] = 0.0
    return values


def golden_payloads(codecs: Sequence[str] = CODECS) -> dict[str, bytes]:
    """File name to bytes: what a worker pushes, and what a server answers to three workers."""
    made = {}
    for text in codecs:
        codec = parse_codec(text)
        residual = golden_input(90) if codec.feedback else None
        pushes = []
        for worker in range(3):
            out = np.zeros(codec.payload_bound(NUMEL), np.uint8)
            pushes.append(out[: codec.encode(golden_input(worker), residual, RESCALE, STREAM, out).payload_bytes])
        acc, kept = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32) if codec.feedback else None
        codec.fold(pushes, NUMEL, 0, NUMEL, acc, True)
        out = np.zeros(codec.payload_bound(NUMEL), np.uint8)
        pull = out[: codec.finish(acc, NUMEL, 0, NUMEL, 3, residual, kept, RESCALE, STREAM, out).payload_bytes]
        name = text.replace(":", "-").replace("=", "")
        made |= {f"{name}.push.bin": pushes[0].tobytes(), f"{name}.pull.bin": pull.tobytes()}
    return made


def main() -> int:
    if sys.argv[1:] != ["--yes"]:
        sys.stderr.write("this overwrites the golden payloads, which fix what codec ids mean; say --yes to do so\n")
        return 2
    for name, payload in golden_payloads().items():
        (FOLDER / name).write_bytes(payload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
