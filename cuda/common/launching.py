"""How kernels are started, with the compiler settings that keep their floats those of the CPU.

Owns the settings, the choice of device, and that the user hears of compilations. The same launch runs under Triton's interpreter on CPU tensors
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
import triton
import triton.language as tl

from psgc.codecs.codec import Stream
from psgc.device.codec import DeviceStream, stream_words
from psgc.diagnostics import compiling

# No fused multiply-add, and denormals are kept: roundings are part of what a codec promises.
SETTINGS: Final[dict[str, Any]] = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
TRITON_DTYPES: Final[dict[torch.dtype, Any]] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Observer = Callable[[Any, int, tuple[Any, ...], dict[str, Any], int], None]
observers: Final[
    list[Observer]
] = []  # called before each launch with (kernel, programs, arguments, constants, num_warps): tools that compile ahead
_lock: Final = threading.Lock()  # a first launch compiles, and Triton does not say that two threads may do so at once


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start ``programs`` programs of a kernel on the current stream of the device of the first tensor among ``arguments``."""
    if programs == 0:
        return
    for observe in observers:
        observe(kernel, programs, arguments, constants, num_warps)
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    other = device.type == "cuda" and device.index != torch.cuda.current_device()
    with _lock, torch.cuda.device(device) if other else nullcontext():
        kernel[(programs,)](*arguments, num_warps=num_warps, **SETTINGS, **constants)


def draws(stream: Stream | DeviceStream | None) -> tuple[torch.Tensor | None, int, int, int]:
    """The kernels' arguments (words, first, before, between): a tensor of the three numbers, or None and the numbers as signed 32-bit integers, so
    that each has one type whatever its value. All 0 for a kernel that draws nothing."""
    if stream is None:
        return None, 0, 0, 0
    if isinstance(stream, DeviceStream):
        return stream.words, 0, 0, 0
    first, before, between = (word - (1 << 32) if word >> 31 else word for word in stream_words(stream))
    return None, first, before, between


def rescaling(rescale: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The kernels' arguments (at, rescale): a tensor of one element, or None and the number."""
    return (rescale, 0.0) if isinstance(rescale, torch.Tensor) else (None, float(rescale))


def _hear_compilations() -> None:
    """Tell of our own kernels that Triton compiles; of those that it has kept on disk there is nothing to tell."""
    before = triton.knobs.compilation.listener

    def heard(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)
        if not cache_hit and str(getattr(getattr(src, "fn", None), "__module__", "")).startswith("psgc.cuda."):
            compiling.gpu_kernel_compiled()

    triton.knobs.compilation.listener = heard


_hear_compilations()
