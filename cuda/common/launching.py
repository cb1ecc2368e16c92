"""How kernels are started, with the compiler settings that keep their floats those of the CPU.

Owns the settings, the choice of device, which compiled kernel a launch takes, and that the user hears of compilations. The same launch runs under Triton's
interpreter on CPU tensors (TRITON_INTERPRET=1).

Triton finds a launch's compiled kernel by what it specializes on, and asks the driver about every pointer: 25 us and more, in which a GPU moves 100 MB. So it
is asked once for each kind of launch (``_Kernel``), and from then on the compiled kernel is started with plain addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
_HERE: Final = nullcontext()
_lock: Final = threading.Lock()  # a first launch compiles, and Triton does not say that two threads may do so at once


class _Kernel:
    """What a kernel has been compiled to. ``changes`` says of each parameter whether Triton leaves its value alone; ``found`` has, by all that Triton
    specializes on, the compiled kernel, and the constants that follow its arguments."""

    __slots__ = ("changes", "found", "kernel")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        parameters = getattr(kernel, "params", None)  # None: the interpreter's, which specializes on nothing
        self.changes = None if parameters is None else [bool(parameter.do_not_specialize) for parameter in parameters]
        self.found: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


_kernels: Final[dict[int, _Kernel]] = {}  # by identity: a kernel's hash is that of its source, under a lock


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start ``programs`` programs of a kernel on the current stream of the device of the first tensor among ``arguments``. constants: the kernel's last
    parameters."""
    if programs == 0:
        return
    for observe in observers:
        observe(kernel, programs, arguments, constants, num_warps)
    own = _kernels.get(id(kernel)) or _kernels.setdefault(id(kernel), _Kernel(kernel))
    passed: list[Any] = []
    kinds: list[Any] = [num_warps, *constants, *constants.values()]
    index = _take(arguments, own.changes, passed, kinds)
    kinds.append(index)
    key = tuple(kinds)
    other = index >= 0 and index != torch.cuda.current_device()
    with torch.cuda.device(index) if other else _HERE:
        if (found := own.found.get(key)) is not None:
            found[0][programs, 1, 1](*passed, *found[1])
            return
        with _lock:
            compiled = kernel[(programs,)](*arguments, num_warps=num_warps, **SETTINGS, **constants)
        if compiled is not None:  # None: the interpreter's
            own.found[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _take(arguments: tuple[Any, ...], changes: Sequence[bool] | None, passed: list[Any], kinds: list[Any]) -> int:
    """Append the arguments to ``passed``, addresses in place of tensors, and what Triton specializes on of each to ``kinds``. Returns the index of the
    device of the first tensor, -1 for the CPU."""
    index = None
    for place, argument in enumerate(arguments):
        kind = type(argument)
        if kind is int:
            kinds.append(argument if changes is None or not changes[place] else -0x80000000 <= argument < 0x80000000)
            passed.append(argument)
        elif kind is float or argument is None:
            kinds.append(kind)
            passed.append(argument)
        elif kind is tuple:
            kinds.append(len(argument))
            inner: list[Any] = []
            first = _take(argument, None, inner, kinds)
            index = first if index is None else index
            passed.append(tuple(inner))
        else:
            address = argument.data_ptr()
            kinds.append(argument.dtype)
            kinds.append(address & 15 == 0)
            passed.append(address)
            if index is None:
                index = argument.get_device()
    return -1 if index is None else index


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
