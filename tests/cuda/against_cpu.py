"""Every operation of a codec's GPU side, held against the CPU's bytes on the same inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from psgc.codecs.backends import cuda_side
from psgc.codecs.codec import Stream
from psgc.codecs.common.floats import reference_narrow_bf16, reference_narrow_f16
from psgc.codecs.registry import parse_codec

STREAM = Stream(seed=5, step=3, rank=2, bucket=7, first=(1 << 32) - 100, layout=9)  # the position wraps around within the part
RESCALE = 0.7


def values(numel: int, seed: int, special: str = "") -> Any:
    """float32 [numel]: Gaussian, of magnitudes that differ; with zeros of both signs, denormals, values that overflow sums, or non-finite ones."""
    generator = np.random.default_rng(seed)
    x = (generator.standard_normal(numel) * 10.0 ** generator.integers(-3, 3, numel)).astype(np.float32)
    places = generator.permutation(numel)[: max(1, numel // 5)]
    if special == "zeros":
        x[places] = np.where(places % 2, np.float32(0), np.float32(-0.0))
    elif special == "denormal":
        x = (x * np.float32(1e-39)).astype(np.float32)
    elif special == "small":  # scales near the smallest normal float
        x = (x * np.float32(1e-36)).astype(np.float32)
    elif special == "huge":
        x[places] = np.copysign(np.float32(3.3e38), x[places])
    elif special in ("nan", "inf"):
        x[places[:1]] = np.float32(special) * (-1 if special == "inf" else 1)
    elif special == "nothing":
        x[:] = 0
    return x


def tensor(array: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(dtype).to(device)


def payload_tensor(payload: Any, device: torch.device) -> torch.Tensor:
    """The bytes, at a multiple of 16."""
    target = torch.empty(max(16, payload.size), dtype=torch.uint8, device=device)[: payload.size]
    return target.copy_(torch.from_numpy(payload.copy()))


def status(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def narrowed(x: Any, dtype: torch.dtype) -> Any:
    """Bits of float32 elements in another dtype, as the library rounds."""
    if dtype == torch.bfloat16:
        return reference_narrow_bf16(x)
    return reference_narrow_f16(x) if dtype == torch.float16 else x.view(np.uint32)


def bits(x: torch.Tensor) -> Any:
    return (
        x.cpu().view(torch.int16 if x.element_size() == 2 else torch.int32).numpy().view(np.uint16 if x.element_size() == 2 else np.uint32)
    )


def assert_same(got: Any, wanted: Any, what: str) -> None:
    """Bits are equal; a NaN of float32 may be any NaN."""
    if got.dtype == np.uint32:
        got, wanted = got.view(np.float32), wanted.view(np.float32)
        same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
    else:
        same = got == wanted
    assert same.all(), f"{what}: {(~same).sum()} of {same.size} differ, first {np.argmin(same)}: {got[~same][:4]} for {wanted[~same][:4]}"


class Pair:
    """A codec and its GPU side."""

    def __init__(self, text: str, device: torch.device, dtype: str = "float32") -> None:
        self.codec, self.device = parse_codec(text, dtype), device
        self.side = cuda_side(self.codec)
        assert self.side is not None, f"{text} has no GPU side"

    def cpu_payload(self, x: Any, residual: Any = None, stream: Stream = STREAM) -> Any:
        out = np.zeros(self.codec.payload_bound(x.size), np.uint8)
        size = self.codec.encode(x, residual, RESCALE, stream, out).payload_bytes
        return out[:size]

    def scratch(self, numel: int) -> torch.Tensor | None:
        size = self.side.scratch_bytes(numel)
        return torch.empty(size, dtype=torch.uint8, device=self.device) if size else None

    def out(self, numel: int) -> torch.Tensor:
        """Memory for a payload, full of what must be overwritten."""
        return torch.full((max(16, self.codec.payload_bound(numel)),), 0xA5, dtype=torch.uint8, device=self.device)

    def check_encode(self, x: Any, dtype: torch.dtype, stream: Stream = STREAM, with_residual: bool = True) -> Any:
        """Payload and flag; returns the payload."""
        grad = tensor(x, self.device, dtype)
        g = grad.cpu().float().numpy()
        residual = values(x.size, 99) if self.codec.feedback and with_residual else None
        wanted = np.zeros(self.codec.payload_bound(x.size), np.uint8)
        encoded = self.codec.encode(g, residual, RESCALE, stream, wanted)
        out, state = self.out(x.size), status(self.device)
        old = None if residual is None else tensor(residual, self.device)
        self.side.encode(grad, old, RESCALE, stream, out, state, self.scratch(x.size))
        flags, size = state.tolist()
        assert size == encoded.payload_bytes
        assert_same(out.cpu().numpy()[:size], wanted[:size], f"payload of {self.codec.canonical}, {dtype}, {x.size}")
        assert bool(flags & 1) == encoded.nonfinite, (self.codec.canonical, x.size, flags)
        return wanted[:size]

    def check_decode(self, payload: Any, numel: int, dtype: torch.dtype) -> None:
        wanted = np.empty(numel, np.float32)
        self.codec.decode(payload, numel, 0, numel, wanted)
        out = torch.full((numel,), 7, dtype=dtype, device=self.device)
        self.side.decode(payload_tensor(payload, self.device), numel, out)
        assert_same(bits(out), narrowed(wanted, dtype), f"elements of {self.codec.canonical}, {dtype}, {numel}")

    def check_commit(self, payload: Any, x: Any, dtype: torch.dtype) -> None:
        grad = tensor(x, self.device, dtype)
        residual = values(x.size, 99)
        old = tensor(residual, self.device)
        self.codec.commit(payload, x.size, 0, x.size, grad.cpu().float().numpy(), residual, RESCALE)
        self.side.commit(payload_tensor(payload, self.device), x.size, grad, old, RESCALE)
        assert_same(bits(old), residual.view(np.uint32), f"residual of {self.codec.canonical}, {x.size}")

    def check_fold(self, payloads: list[Any], numel: int) -> None:
        for fresh in (True, False):
            acc = values(numel, 98)
            target = tensor(acc, self.device)
            self.codec.fold(payloads, numel, 0, numel, acc, fresh)
            self.side.fold([payload_tensor(payload, self.device) for payload in payloads], numel, target, fresh)
            assert_same(bits(target), acc.view(np.uint32), f"sum of {len(payloads)} of {self.codec.canonical}, {numel}, fresh={fresh}")

    def check_finish(self, sums: Any, divisor: int) -> None:
        numel, feedback = sums.size, self.codec.feedback
        residual, kept = (values(numel, 97), np.empty(numel, np.float32)) if feedback else (None, None)
        wanted = np.zeros(self.codec.payload_bound(numel), np.uint8)
        encoded = self.codec.finish(sums.copy(), numel, 0, numel, divisor, residual, kept, RESCALE, STREAM, wanted)
        out, state = self.out(numel), status(self.device)
        old = None if residual is None else tensor(residual, self.device)
        new = None if residual is None else torch.full((numel,), 7.0, device=self.device)
        self.side.finish(tensor(sums, self.device), numel, divisor, old, new, RESCALE, STREAM, out, state, self.scratch(numel))
        self._check_answer(f"finish of {self.codec.canonical}, {numel}", out, state, wanted, encoded, new, kept)

    def check_serve(self, push: Pair, payloads: list[Any], numel: int, divisor: int) -> bool:
        """The fused server pass; False where there is none."""
        feedback, sums = self.codec.feedback, np.empty(numel, np.float32)
        residual, kept = (values(numel, 97), np.empty(numel, np.float32)) if feedback else (None, None)
        push.codec.fold(payloads, numel, 0, numel, sums, True)
        wanted = np.zeros(self.codec.payload_bound(numel), np.uint8)
        encoded = self.codec.finish(sums, numel, 0, numel, divisor, residual, kept, RESCALE, STREAM, wanted)
        out, state = self.out(numel), status(self.device)
        old = None if residual is None else tensor(residual, self.device)
        new = None if residual is None else torch.full((numel,), 7.0, device=self.device)
        sources = [payload_tensor(payload, self.device) for payload in payloads]
        served = self.side.fold_and_finish(
            push.codec, sources, numel, divisor, old, new, RESCALE, STREAM, out, state, self.scratch(numel)
        )  # fmt: skip
        if served:
            self._check_answer(f"server pass of {self.codec.canonical}, {numel}", out, state, wanted, encoded, new, kept)
        return bool(served)

    def check_all(self, x: Any, dtypes: tuple[torch.dtype, ...], payloads: int = 2) -> None:
        """Every operation once for each dtype of gradients."""
        for dtype in dtypes:
            payload = self.check_encode(x, dtype)
            self.check_decode(payload, x.size, dtype)
            if self.codec.feedback:
                self.check_commit(payload, x, dtype)
        sources = [self.cpu_payload(values(x.size, seed)) for seed in range(payloads - 1)] + [payload]
        self.check_fold(sources, x.size)
        self.check_finish(x, 3)
        self.check_serve(self, sources, x.size, payloads)

    def _check_answer(self, what: str, out: torch.Tensor, state: torch.Tensor, wanted: Any, encoded: Any, new: Any, kept: Any) -> None:
        flags, size = state.tolist()
        assert size == encoded.payload_bytes, what
        assert_same(out.cpu().numpy()[:size], wanted[:size], what)
        assert bool(flags & 1) == encoded.nonfinite, (what, flags)
        if kept is not None:
            assert_same(bits(new), kept.view(np.uint32), f"{what}, residual")
