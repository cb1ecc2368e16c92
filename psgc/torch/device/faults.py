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
    if not isinstance(error, RuntimeError):
        return DeviceError(f"{device}: {type(error).__name__}: {error}")
    text = " ".join(str(error).split())
    text = text.split(" CUDA kernel errors might be", 1)[0].split(" Compile with ", 1)[0].rstrip(". ")
    if isinstance(error, torch.OutOfMemoryError):
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
    """Raise what torch raises here as DeviceError."""
    try:
        yield
    except RuntimeError as error:
        raise fault_of(error, device) from error
