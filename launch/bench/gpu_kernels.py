"""``psgc bench kernels --device cuda``: GPU sides of codecs against a device-to-device copy of the same fp32 data, beside torch and torch.compile.

Measures only. Each operation is timed by a *stopwatch*: on a GPU by events in the stream, around as many calls as take a millisecond, on inputs that rotate
so that no cache holds them. A codec whose payload differs from the CPU's is not timed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from psgc.codecs.codec import Codec, Encoded
from psgc.codecs.common.one_part import RESCALE, STREAM, WORKERS, gaussian
from psgc.codecs.registry import parse_codec
from psgc.errors import CodecError, ConfigError
from psgc.launch.bench.baselines import MULTIPLE, WITH_BASELINES, torch_baselines

CHECKED: Final = 70_001  # elements that a codec is checked on
ROTATED_BYTES: Final = 256 << 20  # more than any GPU's cache: operations take turns with so many bytes of gradients
REPEATS: Final = 15
IMPLEMENTATIONS: Final = ("torch", "torch.compile")
Operations = dict[str, Callable[[int], object]]  # each given the number of the input set


class Stopwatch(Protocol):
    """Where kernels run, and how long they take there."""

    device: torch.device
    name: str

    def side(self, codec: Codec) -> Any:
        """The codec's ``DeviceCodec``, or None."""

    def seconds(self, run: Callable[[int], object], sets: int) -> float:
        """The median time of one call."""


class CudaStopwatch:
    """Runs and times kernels on the first GPU. Raises ConfigError if there is none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("bench kernels: --device cuda, but torch sees no CUDA device on this machine; use --device cpu")
        from psgc.cuda.common.usable import why_not

        if reason := why_not():
            raise ConfigError(f"bench kernels: kernels cannot run on this machine's GPU: {reason}")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)

    def side(self, codec: Codec) -> Any:
        from psgc.codecs.backends import device_codec

        return device_codec(codec, self.device)

    def seconds(self, run: Callable[[int], object], sets: int) -> float:
        for number in range(sets + 2):
            run(number % sets)
        torch.cuda.synchronize(self.device)
        took, calls = 0.0, 1
        found: list[float] = []
        while len(found) < REPEATS:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for number in range(calls):
                run(number % sets)
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
            if took < 1e-3 and calls < 1 << 12:
                calls *= 2
            else:
                found.append(took / calls)
        return statistics.median(found)


class HostStopwatch:
    """Runs everything on the CPU and times that, for dry runs. sides: gives a stand-in for a codec's GPU side."""

    def __init__(self, sides: Callable[[Codec], Any]) -> None:
        self.device, self.name, self.side = torch.device("cpu"), "no GPU (dry run)", sides

    def seconds(self, run: Callable[[int], object], sets: int) -> float:
        began = time.perf_counter()
        run(0)
        return time.perf_counter() - began


def bench_gpu_kernels(
    sizes: Sequence[int], codecs: Sequence[str], watch: Stopwatch, tell: Callable[[str], None] = lambda text: None,
    beside: Sequence[str] = IMPLEMENTATIONS,
) -> dict[str, Any]:  # fmt: skip
    """Time each codec's operations, and baselines of encode and decode. ``rows``: seconds, the bytes that the operation has to move, GB/s of these, and
    their share of the copy's GB/s in the same run. ``without``: codecs that have no GPU side. Raises CodecError for a payload that is not the CPU's."""
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"bench kernels: --sizes (or --numel) of at least 1 element expected, got {', '.join(map(str, sizes))}")
    copy_gbps = {numel: _copy_gbps(numel, watch) for numel in sorted(set(sizes))}
    rows: list[dict[str, Any]] = []
    without: list[str] = []
    left_out: dict[str, str] = {}
    for text in codecs:
        codec = parse_codec(text)
        side = watch.side(codec)
        if side is None:
            without.append(codec.canonical)
            continue
        tell(f"{codec.canonical}: checking, then timing")
        check_side(codec, side, watch.device)
        for numel, copied in copy_gbps.items():
            count = _sets(numel)
            for op, (run, moved) in _operations(codec, side, numel, count, watch.device).items():
                rows.append(_row(codec.canonical, "psgc", op, numel, watch.seconds(run, count), moved, copied))
            for implementation in beside if codec.canonical in WITH_BASELINES and numel % MULTIPLE == 0 else ():
                if implementation in left_out or (implementation == "torch.compile" and numel != max(copy_gbps)):
                    continue
                tell(f"{codec.canonical}: {implementation} beside it")
                try:
                    for op, (run, moved) in _baseline(codec, side, implementation, numel, watch.device).items():
                        rows.append(_row(codec.canonical, implementation, op, numel, watch.seconds(run, 1), moved, copied))
                except Exception as error:  # whatever torch cannot compile, or has too little memory for
                    left_out[implementation] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return {"device": watch.name, "copy_gbps": copy_gbps, "rows": rows, "without": without, "left_out": left_out}


def check_side(codec: Codec, side: Any, device: torch.device, numel: int = CHECKED) -> None:
    """Raise CodecError unless the GPU side writes the CPU's payload of the same part."""
    grad, residual = gaussian(numel, 0), gaussian(numel, 1) if codec.feedback else None
    out = np.zeros(codec.payload_bound(numel), np.uint8)
    given: Any = grad if np.dtype(codec.array_dtype) == np.float32 else grad.astype(codec.array_dtype)
    wanted: Encoded = codec.encode(given, residual, RESCALE, STREAM, out)
    one = _Set(codec, side, numel, device, 0)
    one.encode(side)
    flagged, count = one.status.tolist()
    if (bool(flagged & 1), count) != (wanted.nonfinite, wanted.payload_bytes):
        differ = f"{count} bytes with flags {flagged} in place of {wanted.payload_bytes} with {int(wanted.nonfinite)}"
    else:
        places = np.flatnonzero(one.out[:count].cpu().numpy() != out[:count])
        differ = f"{places.size} of {count} bytes, the first at {places[0]}" if places.size else ""
    if differ:
        raise CodecError(f"codec {codec.canonical}: the payload of its GPU side is not the CPU's ({differ}), so it is not timed")


@functools.lru_cache(maxsize=40)
def _drawn(numel: int, seed: int, device: torch.device) -> torch.Tensor:
    """Input on the device that every codec reads and none writes: copying 100 M elements there takes longer than all that is timed with them."""
    return torch.from_numpy(gaussian(numel, seed)).to(device)


class _Set:
    """The inputs and outputs of one call."""

    def __init__(self, codec: Codec, side: Any, numel: int, device: torch.device, number: int) -> None:
        self.numel = numel
        self.grad = _drawn(numel, 2 * number, device)
        self.residual = _drawn(numel, 2 * number + 1, device) if codec.feedback else None
        self.left = None if self.residual is None else self.residual.clone()
        self.acc = self.grad.clone()
        self.out = torch.zeros(max(16, codec.payload_bound(numel)), dtype=torch.uint8, device=device)
        self.status = torch.zeros(2, dtype=torch.int64, device=device)
        scratch = side.scratch_bytes(numel)
        self.scratch = torch.empty(scratch, dtype=torch.uint8, device=device) if scratch else None

    def encode(self, side: Any) -> None:
        side.encode(self.grad, self.residual, RESCALE, STREAM, self.out, self.status, self.scratch)


def _sets(numel: int) -> int:
    return max(1, min(8, -(-ROTATED_BYTES // (4 * numel))))


def _operations(codec: Codec, side: Any, numel: int, count: int, device: torch.device) -> dict[str, tuple[Callable[[int], object], int]]:
    sets = [_Set(codec, side, numel, device, number) for number in range(count)]
    for one in sets:
        one.encode(side)
    payloads = [one.out[: int(one.status[1])] for one in sets]

    def encode(n: int) -> None:
        sets[n].encode(side)

    def decode(n: int) -> None:
        side.decode(payloads[n], numel, sets[n].acc)

    def commit(n: int) -> None:
        side.commit(payloads[n], numel, sets[n].grad, sets[n].left, 1.0)

    def fold(n: int) -> None:
        side.fold([payloads[(n + k) % count] for k in range(WORKERS)], numel, sets[n].acc, True)

    def finish(n: int) -> None:
        one = sets[n]
        side.finish(one.acc, numel, 1, one.residual, one.left, 1.0, STREAM, scraps[n], one.status, one.scratch)

    scraps = [torch.zeros_like(one.out) for one in sets]
    found: dict[str, tuple[Callable[[int], object], int]] = {
        "encode": (encode, side.moved_bytes("encode", numel)),
        "decode": (decode, side.moved_bytes("decode", numel)),
        **({"commit": (commit, side.moved_bytes("commit", numel))} if codec.feedback else {}),
        f"fold {WORKERS}": (fold, side.moved_bytes("fold", numel, payloads=WORKERS)),
    }
    if not codec.feedback or sets[0].left is not None:
        found["finish"] = finish, side.moved_bytes("finish", numel)
    return found


def _baseline(
    codec: Codec, side: Any, implementation: str, numel: int, device: torch.device
) -> dict[str, tuple[Callable[[int], object], int]]:
    """Encode and decode of the same codec in torch, which move the same bytes."""
    with torch.no_grad(), device:
        plain = torch_baselines()[codec.canonical]
        encode, decode = plain.encode, plain.decode
        if implementation == "torch.compile":
            torch.compiler.reset()
            encode, decode = torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False)
        grad, residual = (torch.from_numpy(gaussian(numel, seed)).to(device) for seed in (0, 1))
        payload = encode(grad, residual, RESCALE)

    def run_encode(_: int) -> None:
        with torch.no_grad():
            encode(grad, residual, RESCALE)

    def run_decode(_: int) -> None:
        with torch.no_grad():
            decode(payload, payload, grad, residual, RESCALE)

    decoded = side.moved_bytes("decode", numel) + (side.moved_bytes("commit", numel) if codec.feedback else 0)
    return {"encode": (run_encode, side.moved_bytes("encode", numel)), "decode and commit": (run_decode, decoded)}


def _copy_gbps(numel: int, watch: Stopwatch) -> float:
    """Bytes read plus bytes written per second by a copy on the device."""
    sets = [tuple(torch.rand(numel, device=watch.device) for _ in range(2)) for _ in range(_sets(numel))]
    took = watch.seconds(lambda n: sets[n][0].copy_(sets[n][1]), len(sets))
    return 8e-9 * numel / took


def _row(codec: str, implementation: str, op: str, numel: int, seconds: float, moved: int, copied: float) -> dict[str, Any]:
    gbps = 1e-9 * moved / seconds
    return {
        "codec": codec, "implementation": implementation, "op": op, "numel": numel, "seconds": seconds, "moved_bytes": moved,
        "gbps": round(gbps, 3), "of_copy": round(gbps / copied, 4),
    }  # fmt: skip


def gpu_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of the largest size, for terminals."""
    largest = max(result["copy_gbps"])
    rows = [
        [row["codec"], row["implementation"], row["op"], f"{1e6 * row['seconds']:,.1f}", f"{row['gbps']:,.0f}", f"{row['of_copy']:.0%}"]
        for row in result["rows"]
        if row["numel"] == largest
    ]
    return ["codec", "by", "operation", "us", "GB/s", "of a copy"], rows
