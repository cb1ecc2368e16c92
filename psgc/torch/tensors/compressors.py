"""Compressors as BytePS's and Horovod's users write them: a class, or an object, with ``compress(tensor) -> (tensor, ctx)`` and ``decompress(tensor, ctx)``.

Each becomes a codec in relay mode (``register_functions``), once a process: what a rank compresses is decompressed on every rank, with the ``ctx`` that came
with it, and then added. Owns the names of these codecs. The functions get parts of fused gradients: float32 vectors, in no parameter's shape.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Final

import torch

from psgc.errors import CodecError, UsageError
from psgc.torch.tensors import plain
from psgc.torch.tensors.functions import Item, register_functions

_lock: Final = threading.Lock()
_known: Final[dict[int, tuple[Any, str]]] = {}  # by id: the compressor, which this keeps alive, and its codec's text


def is_compressor(given: Any) -> bool:
    """Whether ``given`` has both functions."""
    return callable(getattr(given, "compress", None)) and callable(getattr(given, "decompress", None))


def codec_of(compressor: Any) -> str:
    """The text of the compressor's codec. Compressors of one name are told apart by a number, in the order in which they are used first, which must be the
    same on all ranks."""
    with _lock:
        if id(compressor) not in _known:
            own = compressor.__name__ if isinstance(compressor, type) else type(compressor).__name__
            name = base = "compressor_" + re.sub(r"\W", "_", own, flags=re.ASCII)
            taken = [text for _, text in _known.values()]
            number = 1
            while f"{name}/relay" in taken:
                number += 1
                name = f"{base}_{number}"
            _register(name, compressor)
            _known[id(compressor)] = compressor, f"{name}/relay"
        return _known[id(compressor)][1]


def _register(name: str, compressor: Any) -> None:
    def compress(p: torch.Tensor) -> tuple[Item, Item]:
        given = compressor.compress(p)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.Tensor)):
            raise CodecError(f"it gave {type(given).__name__}, expected (tensor, ctx)")
        try:
            return given[0], plain.encode(given[1], "ctx")
        except UsageError:
            raise CodecError(
                f"its ctx holds a {type(given[1]).__name__} that cannot travel, but every rank needs the ctx to decompress; "
                f"plain types travel: {plain.PLAIN_TEXT}"
            ) from None

    def decompress(items: tuple[Any, ...], numel: int) -> torch.Tensor:
        compressed, ctx = items
        given: torch.Tensor = compressor.decompress(compressed, plain.decode(ctx))
        return given

    register_functions(name, compress, decompress)
