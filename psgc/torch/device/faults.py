"""What a device's errors mean, in one line: out of memory, a device that is gone, or another error of its runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from psgc.errors import DeviceError

_LOST = (
    "device unavailable",
    "unavailable",
    "has fallen off the bus",
    "device lost",
    "device is lost",
    "no cuda-capable device",
    "ecc error",
)


def fault_of(error: BaseException, device: str) -> DeviceError:
    """The error as psgc tells it. device: its name."""
    if isinstance(error, DeviceError):
        return error
    if _is_tritons(error):
        said = " ".join(str(error).split())[-300:]
        return DeviceError(
            f"{device}: a kernel cannot be compiled or started ({type(error).__name__}: {said}); set PSGC_GPU_CODECS=0, which encodes on the CPU"
        )
    if not isinstance(error, RuntimeError):
        return DeviceError(f"{device}: {type(error).__name__}: {error}")
    text = " ".join(str(error).split())
    text = text.split(" CUDA kernel errors might be", 1)[0].split(" Compile with ", 1)[0].rstrip(". ")
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return DeviceError(
            f"{device} is out of memory ({text}); make the batch smaller, or set PSGC_GPU_CODECS=0, which encodes on the CPU"
        )
    if any(sign in text.lower() for sign in _LOST):
        return DeviceError(
            f"{device} has been lost ({text}); see nvidia-smi and the kernel's log, and start the job again without this device"
        )
    return DeviceError(f"{device}: {text}")


@contextmanager
def device_faults(device: str) -> Iterator[None]:
    """Raise what torch and Triton raise here as DeviceError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) or _is_tritons(error):
            raise fault_of(error, device) from error
        raise


def _is_tritons(error: BaseException) -> bool:
    """Whether it is an error of Triton's compiler, whose classes are not imported here."""
    return any(cls.__module__.partition(".")[0] == "triton" for cls in type(error).__mro__)
