"""Which backends a codec has, ``cpu`` and ``cuda``, and its GPU side: the only file that knows all of them.

A GPU side is a ``psgc.device.codec.DeviceCodec``. Its module, and with it triton, is imported when a CUDA tensor first needs it, never
where there is no CUDA. A codec class without a row runs on the CPU; a subclass has a row of its own, for its payload may be another one.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from psgc.codecs.codec import Codec
from psgc.codecs.scheme import Scheme
from psgc.errors import CodecError

# "module:Class" of a codec -> "module:Name" of what makes its GPU side from an instance, or gives None if its parameters have none.
_CUDA: dict[str, str] = {
    "psgc.codecs.none:NoneCodec": "psgc.cuda.floats.floats:none_device_codec",
    "psgc.codecs.cast:Bf16Codec": "psgc.cuda.floats.floats:FloatDeviceCodec",
    "psgc.codecs.cast:Fp16Codec": "psgc.cuda.floats.floats:FloatDeviceCodec",
    "psgc.codecs.blocktopk:BlockTopKCodec": "psgc.cuda.sparsify.blocktopk:BlockTopKDevice",
    "psgc.codecs.randomk:RandomKCodec": "psgc.cuda.sparsify.randomk:RandomKDevice",
    "psgc.codecs.topk:TopKCodec": "psgc.cuda.sparsify.topk:TopKDevice",
    "psgc.codecs.int8:Int8Codec": "psgc.cuda.quantize.blocks:integer_side",
    "psgc.codecs.int4:Int4Codec": "psgc.cuda.quantize.blocks:integer_side",
    "psgc.codecs.fp8:Fp8Codec": "psgc.cuda.quantize.blocks:float8_side",
    "psgc.codecs.dithering:DitheringCodec": "psgc.cuda.quantize.blocks:integer_side",
    "psgc.codecs.dithering:NaturalDitheringCodec": "psgc.cuda.quantize.blocks:natural_side",
    "psgc.codecs.tbq:TbqCodec": "psgc.cuda.quantize.blocks:threshold_side",
    "psgc.codecs.onebit:OneBitCodec": "psgc.cuda.signs.onebit:OneBitDeviceCodec",
    "psgc.codecs.onebit:UnitOneBitCodec": "psgc.cuda.signs.onebit:OneBitDeviceCodec",
}
# "module:Class" of a scheme -> "module:Name" of what makes its ``psgc.device.state.DeviceState``, or gives None where its codecs have no GPU side.
_CUDA_SCHEMES: dict[str, str] = {
    "psgc.codecs.scheme:PairScheme": "psgc.cuda.states.pair:pair_state",
    "psgc.codecs.relay:RelayScheme": "psgc.cuda.states.relay:relay_state",
    "psgc.codecs.momentum:MomentumScheme": "psgc.cuda.states.momentum:momentum_state",
    "psgc.codecs.shared:SharedScheme": "psgc.cuda.shared.shared:SharedDeviceState",
    "psgc.codecs.powersgd:PowerSgdScheme": "psgc.cuda.lowrank.powersgd:PowerSgdDeviceState",
}


def register_cuda(codec: str, made_by: str) -> None:
    """Give a codec of another package a GPU side. Both are "module:Name": the codec's class, and a ``DeviceCodec`` that is built from an instance of
    it. Nothing is imported. Raises CodecError for a class that has a GPU side already."""
    if _CUDA.setdefault(codec, made_by) != made_by:
        raise CodecError(f"codec class {codec} has a GPU side already, {_CUDA[codec]}; {made_by} cannot be another one")


def backends(codec: Codec) -> tuple[str, ...]:
    """``("cpu",)``, or ``("cpu", "cuda")`` where a GPU side is registered for the codec's class."""
    return ("cpu", "cuda") if _made_by(codec) else ("cpu",)


def lacking(scheme: Scheme) -> str | None:
    """The scheme, or the codec of its own, without which a worker cannot keep the scheme's state on a GPU; None where nothing is lacking."""
    if not _made_by(scheme):
        return scheme.canonical
    return next((codec.canonical for codec in scheme.device_codecs if "cuda" not in backends(codec)), None)


def device_codec(codec: Codec, device: Any) -> Any:
    """The codec's GPU side, a ``DeviceCodec``, for tensors on ``device``, a ``torch.device`` or its text; None for the CPU, and for a codec that has none."""
    return cuda_side(codec) if str(device).partition(":")[0] == "cuda" else None


def cuda_side(codec: Codec) -> Any:
    """The codec's GPU side, a ``DeviceCodec``, or None. Imports triton: only for machines with CUDA, or under Triton's interpreter."""
    target = _made_by(codec)
    return _made(target)(codec) if target else None


def _made_by(made: Codec | Scheme) -> str:
    """The maker of the GPU side: the row of the class, or the ``cuda_made_by`` of its base class; "" for none."""
    rows = _CUDA_SCHEMES if isinstance(made, Scheme) else _CUDA
    return rows.get(_class_name(made)) or str(getattr(type(made), "cuda_made_by", ""))


def device_state(scheme: Scheme, numel: int, device: Any) -> Any:
    """A worker's state for a part on ``device``, a ``DeviceState``; None for the CPU, and for a scheme or codec without a GPU side."""
    return cuda_state(scheme, numel, device) if str(device).partition(":")[0] == "cuda" else None


def cuda_state(scheme: Scheme, numel: int, device: Any) -> Any:
    """A worker's state on any device, a ``DeviceState``, or None. Imports triton, as ``cuda_side`` does."""
    target = _made_by(scheme)
    return _made(target)(scheme, numel, device) if target else None


def _class_name(codec: Codec | Scheme) -> str:
    return f"{type(codec).__module__}:{type(codec).__qualname__}"


@functools.cache
def _made(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
