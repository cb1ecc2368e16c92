"""The GPU side of codecs that are written with the kit: their ``compress`` and ``expand``, run with `ops.TorchOps` over the whole part.

Only codecs whose fields have fixed counts have one: of the others, the host would have to wait for each payload's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.kit.codec import KitCodec
from psgc.codecs.kit.ops import Random, packed_bytes
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.many import alike, check_decoding
from psgc.cuda.kit.ops import OnePartOnly, TorchOps
from psgc.cuda.kit.vectors import DeviceVector, from_bytes, to_bytes
from psgc.device.codec import Decoding, DeviceCodec, DeviceStream, Encoding
from psgc.errors import CodecError

TOGETHER_ELEMENTS: Final = 1 << 17  # of a part that is encoded with others: beyond, starting the operators is the lesser part of the time


class KitDevice(DeviceCodec):
    """See the module's text."""

    def __init__(self, codec: KitCodec) -> None:
        super().__init__(codec)
        self._kit = codec

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, grad.numel(), grad=grad, residual=residual)
        self._write(_corrected(grad, 1, residual, rescale), stream, out, status)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        p = self._write(_corrected(acc, divisor, residual, rescale), stream, out, status)
        if residual_out is not None:
            torch.sub(p, self._read(out, numel), out=residual_out)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, out=out)
        out.copy_(self._read(payload, numel))

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, grad=grad, residual=residual)
        p = _corrected(grad, 1, residual, rescale)
        torch.sub(torch.where(torch.isfinite(p), p, 0.0), self._read(payload, numel), out=residual)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        total = self._read(payloads[0], numel)
        for payload in payloads[1:]:
            total = total + self._read(payload, numel)
        acc.copy_(total if fresh else acc + total)

    def _write(self, p: torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor) -> torch.Tensor:
        """Write the payload; returns p with zeros for what is not finite."""
        host, numel = self._host_stream(stream), p.numel()
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        finite = torch.isfinite(p)
        status[0:1] |= (~finite.all()).long()
        p = torch.where(finite, p, 0.0)
        self._compress(TorchOps(out.device), p, host, out)
        status[1:2].fill_(self._kit.layout(numel).bound)
        return p

    def encode_many(self, items: Sequence[Encoding]) -> None:
        groups: dict[tuple[object, ...], list[Encoding]] = {}
        for item in items:
            numel = item.grad.numel()
            check_part(self.codec, item.out.device, numel, grad=item.grad, residual=item.residual)
            check_payload(self.codec, item.out.device, numel, item.out, "out")
            check_status(self.codec, item.out.device, item.status)
            self._host_stream(item.stream)
            factor = id(item.rescale) if isinstance(item.rescale, torch.Tensor) else item.rescale
            key = item.out.device, numel, item.grad.dtype, item.residual is None, factor
            groups.setdefault(key if 0 < numel <= TOGETHER_ELEMENTS else (id(item),), []).append(item)
        for group in groups.values():
            if len(group) == 1 or not self._write_many(group):
                super().encode_many(group)

    def _write_many(self, items: Sequence[Encoding]) -> bool:
        """Write the payloads of parts of one length by one run of the operators. Returns False, and writes nothing, where the codec uses some that take one
        part at a time."""
        first, numel = items[0], items[0].grad.numel()
        kept = [item.residual for item in items if item.residual is not None]
        p = _corrected(torch.stack([item.grad for item in items]), 1, torch.stack(kept) if kept else None, first.rescale)
        finite, bound = torch.isfinite(p), self._kit.layout(numel).bound
        payloads = torch.empty(len(items), bound, dtype=torch.uint8, device=p.device)
        streams = [self._host_stream(item.stream) for item in items]
        try:
            self._compress(TorchOps(p.device, streams), torch.where(finite, p, 0.0), streams[0], payloads)
        except OnePartOnly:
            return False
        statuses = [item.status for item in items]
        flags = torch.stack(statuses)
        flags[:, 0] |= (~finite.all(1)).long()
        flags[:, 1] = bound
        torch._foreach_copy_(statuses, list(flags))
        torch._foreach_copy_([item.out[:bound] for item in items], list(payloads))
        return True

    def decode_many(self, items: Sequence[Decoding]) -> None:
        groups: dict[tuple[object, ...], list[Decoding]] = {}
        for item in items:
            check_decoding(self.codec, item)
            key = item.numel, *alike(item)
            groups.setdefault(key if 0 < item.numel <= TOGETHER_ELEMENTS else (id(item),), []).append(item)
        for group in groups.values():
            if len(group) == 1 or not self._use_many(group):
                super().decode_many(group)

    def _use_many(self, items: Sequence[Decoding]) -> bool:
        """Use the payloads of parts of one length alike, by one run of the operators. Returns False, and changes nothing, where the codec uses some that take
        one part at a time."""
        first, numel, targets = items[0], items[0].numel, [item.target for item in items]
        bound, count = self._kit.layout(numel).bound, len(first.payloads)
        payloads = torch.stack([item.payloads[k][:bound] for k in range(count) for item in items])
        try:
            rows = self._expand(TorchOps(payloads.device, ()), payloads, numel).expand(len(payloads), numel)
        except OnePartOnly:
            return False
        total, *others = rows.split(len(items))
        for other in others:
            total = total + other
        if first.use == "add":
            torch._foreach_add_(targets, list(total))
            return True
        if first.use == "commit":
            grads = torch.stack([item.grad for item in items if item.grad is not None])
            p = _corrected(grads, 1, torch.stack(targets), first.rescale)
            total = torch.where(torch.isfinite(p), p, 0.0) - total
        torch._foreach_copy_(targets, list(total))
        return True

    def _host_stream(self, stream: Stream | DeviceStream) -> Stream:
        if isinstance(stream, DeviceStream):
            raise CodecError(
                f"codec {self.codec.name}: codecs of the kit draw by a Stream of the host; they are not encoded in a graph whose step changes"
            )
        return stream

    def _compress(self, ops: TorchOps, p: torch.Tensor, stream: Stream, out: torch.Tensor) -> None:
        """Write the fields of a part's payload, or of those of several parts, which are rows, then."""
        numel = p.shape[-1]
        layout = self._kit.layout(numel)
        values = self._kit.compress(ops, DeviceVector(p, "f32"), Random(ops, stream, 0, numel))
        for name, field in layout.fields.items():
            value: DeviceVector = values[name]
            if value.dtype != field.dtype or value.shape != (layout.count(name),):
                raise CodecError(
                    f"codec {self.codec.name}: compress gave {value.dtype}{list(value.shape)} for field {name!r}, which is {field.dtype}[{layout.count(name)}]"
                )
            data = ops.pack(value, field.bits) if field.bits < 8 else ops.saturate(value) if field.dtype.kind == "f" else value
            held = to_bytes(data)
            out[..., layout.starts[name] : layout.starts[name] + held.shape[-1]] = held

    def _read(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """The payload's elements, float32."""
        check_payload(self.codec, payload.device, numel, payload)
        return self._expand(TorchOps(payload.device), payload, numel)

    def _expand(self, ops: TorchOps, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """The elements of a payload, or of several, which are rows, then."""
        layout, fields = self._kit.layout(numel), {}
        for name, field in layout.fields.items():
            start, count = layout.starts[name], layout.count(name)
            data = payload[..., start : start + packed_bytes(count, field.bits)]
            fields[name] = ops.unpack(DeviceVector(data, "u8"), field.bits, count) if field.bits < 8 else from_bytes(data, field.dtype)
        elements: DeviceVector = self._kit.expand(ops, fields, numel)
        if elements.type != "f32" or elements.shape != (numel,):
            raise CodecError(f"codec {self.codec.name}: expand gave {elements.dtype}{list(elements.shape)}, not float32[{numel}]")
        return ops.saturate(elements).data


def kit_side(codec: Codec) -> KitDevice | None:
    """The codec's GPU side, or None for one whose payloads vary in length."""
    assert isinstance(codec, KitCodec)
    return KitDevice(codec) if codec.layout(1).fixed else None


def _corrected(values: torch.Tensor, divisor: int, residual: torch.Tensor | None, rescale: float | torch.Tensor) -> torch.Tensor:
    """values / divisor + rescale * residual, each operation rounded."""
    p = values.float()
    if divisor != 1:
        p = p / torch.full((1,), divisor, dtype=torch.float32, device=p.device)  # by a number, torch would multiply with its reciprocal
    return p if residual is None else p + residual * rescale
