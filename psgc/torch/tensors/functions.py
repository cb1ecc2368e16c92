"""``register_functions``: a plain pair of torch functions as a codec, in relay mode.

| offset     | type                       | meaning                                                                         |
|------------|----------------------------|---------------------------------------------------------------------------------|
| 0          | u8                         | items                                                                           |
| 1          | each (u8, u8, u32 [dims])  | an item's dtype (its place in DTYPES, 255 for plain bytes), dimensions, extents |
| then       | bytes                      | the items, one after the other; little-endian, without padding                  |

Owns these bytes and the conversion between tensors and NumPy; ``psgc.codecs.script_codec`` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import registry
from psgc.codecs.common.script_functions import Functions
from psgc.errors import CodecError, PayloadError, UsageError
from psgc.torch.tensors.buffers import TORCH_DTYPES

Bytes = NDArray[np.uint8]
Item: TypeAlias = "torch.Tensor | bytes | bytearray | memoryview"
DTYPES: Final = ("float32", "bfloat16", "float16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
_PLAIN: Final = 255


def register_functions(
    name: str,
    compress: Callable[[torch.Tensor], Sequence[Item]],
    decompress: Callable[[tuple[Any, ...], int], torch.Tensor],
    *,
    bytes_per_element: float = 4.0,
    extra_bytes: int = 4096,
    feedback: bool = False,
) -> None:
    """Make ``"<name>/relay"`` a codec of this job. Call it on every worker, before the name is used; servers need nothing.

    compress:  gets a part's gradient, a float32 vector on the CPU that it may overwrite; gives a tuple of at most 255 tensors or bytes.
    decompress: gets that tuple (bytes-like items as ``bytes``) and the number of elements; gives a tensor of as many. Every worker must get
               the same from the same tuple, on whatever machine, or replicas drift apart.
    bytes_per_element, extra_bytes: a payload of n elements takes at most ``bytes_per_element * n + extra_bytes``.
    feedback:  psgc keeps what was not sent and adds it to the next step's gradient.

    Both are called from psgc's threads, without autograd. Raises CodecError for a name that is taken, UsageError for what is no function.
    """
    given: dict[str, Any] = {"compress": compress, "decompress": decompress}
    for which, function in given.items():
        if not callable(function):
            raise UsageError(f"register_functions: {which} of {name!r} is a {type(function).__name__}, expected a function")

    def write(p: NDArray[np.float32]) -> Bytes:
        with torch.no_grad():
            return _packed(name, _called(name, "compress", compress, torch.from_numpy(p)))

    def read(payload: Bytes, numel: int) -> NDArray[np.float32]:
        items = _unpacked(name, payload)
        with torch.no_grad():
            given = _called(name, "decompress", decompress, items, numel)
        if not isinstance(given, torch.Tensor) or given.numel() != numel:
            what = f"{given.numel()} elements" if isinstance(given, torch.Tensor) else type(given).__name__
            raise CodecError(f"codec {name}: decompress gave {what}, expected a tensor of {numel} elements")
        elements: NDArray[np.float32] = given.detach().reshape(-1).to("cpu", torch.float32).numpy()
        return elements

    registry.register_functions(name, Functions(write, read, bytes_per_element, extra_bytes, feedback))


def _called(name: str, which: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # whatever it does wrong, the job's last line must name it
        raise CodecError(f"codec {name}: {which} failed: {type(error).__name__}: {error}") from error


def _packed(name: str, items: Any) -> Bytes:
    if not isinstance(items, tuple | list) or len(items) >= _PLAIN + 1:
        raise CodecError(f"codec {name}: compress gave {type(items).__name__}, expected a tuple of at most {_PLAIN} tensors or bytes")
    head, data = bytearray([len(items)]), []
    for item in items:
        if isinstance(item, torch.Tensor):
            dtype = str(item.dtype).removeprefix("torch.")
            if dtype not in DTYPES or item.dim() > 255:
                raise CodecError(f"codec {name}: compress gave a tensor of {dtype}; {', '.join(DTYPES)} are carried")
            head += bytes([DTYPES.index(dtype), item.dim()]) + np.array(item.shape, "<u4").tobytes()
            data.append(item.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
        elif isinstance(item, bytes | bytearray | memoryview):
            data.append(np.frombuffer(item, np.uint8))
            head += bytes([_PLAIN, 1]) + np.uint32(data[-1].size).tobytes()
        else:
            raise CodecError(f"codec {name}: compress gave {type(item).__name__} in its tuple, expected tensors or bytes")
    return np.concatenate([np.frombuffer(head, np.uint8), *data])


def _unpacked(name: str, payload: Bytes) -> tuple[Any, ...]:
    data = payload.tobytes()
    place, forms = 1, []
    for _ in range(data[0] if data else 0):
        kind, dims = (data[place], data[place + 1]) if place + 2 <= len(data) else (_PLAIN, 0)
        end = place + 2 + 4 * dims
        if end > len(data) or not (kind < len(DTYPES) or (kind == _PLAIN and dims == 1)):
            raise PayloadError(f"{name} payload of {len(data)} bytes: its list of items is cut short or names an unknown type")
        forms.append((kind, np.frombuffer(data, "<u4", dims, place + 2).tolist()))
        place = end
    items: list[Any] = []
    for kind, shape in forms:
        dtype = torch.uint8 if kind == _PLAIN else TORCH_DTYPES[DTYPES[kind]]
        nbytes = math.prod(shape) * dtype.itemsize
        chunk, place = data[place : place + nbytes], place + nbytes
        if place > len(data):
            break
        items.append(chunk if kind == _PLAIN else _tensor(chunk, dtype, shape))
    if not data or place != len(data):
        raise PayloadError(f"{name} payload of {len(data)} bytes: its items take {place}")
    return tuple(items)


def _tensor(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not data:  # torch gives no other view of an empty array
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return (flat != 0 if dtype == torch.bool else flat.view(dtype)).reshape(shape)
