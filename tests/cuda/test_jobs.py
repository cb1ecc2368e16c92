"""Buckets of jobs through the kernels themselves, under Triton's interpreter: the CPU's results and residuals bit for bit; and what `psgc warm` launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs.backends import cuda_side, cuda_state
from psgc.codecs.codec import CodecPair
from psgc.codecs.int8 import Int8Codec
from psgc.codecs.scheme import PairScheme
from psgc.device.codec import Decoding, Encoding
from psgc.errors import CodecError
from psgc.torch.device import engines
from tests.cuda.against_cpu import STREAM, Pair, status
from tests.cuda.conftest import INTERPRETED
from tests.device.recording import RecordingRuntime
from tests.device.steps import Bucket, one_bucket, use_recorded
from tests.device.test_device_payloads import SHARED, Connected
from tests.device.test_device_programs import on, played

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="kernels run on memory of the CPU only under the interpreter: run `make test-kernels`"
)
NUMEL = 301


class Quiet:
    """A GPU side on whatever thread it is called: the interpreter computes with NumPy, which warns of overflow by thread."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._side, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            with np.errstate(all="ignore"):
                return found(*arguments)

        return call


class KernelRuntime(RecordingRuntime):
    """A recorded device whose codecs are the GPU's."""

    def codec(self, codec: Any) -> Any:
        side = cuda_side(codec)
        return None if side is None else Quiet(side)

    def state(self, scheme: Any, numel: int) -> Any:
        return cuda_state(scheme, numel, self.device)


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


@pytest.mark.parametrize(
    ("codec", "dtype", "sizes"),
    [
        ("topk:k=0.1,select=sampled", torch.float32, (3,)),
        ("blocktopk:k=0.3,block=16/topk:k=0.2", torch.bfloat16, (2,)),
        ("topk:k=0.7", torch.float32, (2,)),
    ],
)
def test_payloads_that_go_from_gpu_to_gpu_give_the_cpus_results_and_residuals(
    codec: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """They lie in memory of their bound, full of what was there before, and are folded there."""
    wanted = played([on(SHARED, "cccc")], codec, dtype, None, sizes, numel=NUMEL)
    with Connected(sizes, made=KernelRuntime) as there:
        found = played([SHARED], codec, dtype, there.runtime, sizes, there.job, NUMEL)
        assert there.runtime.races.found == []
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


class Launched:
    """What Triton would compile a kernel for: names, types of arguments, constants."""

    def __init__(self) -> None:
        self.kinds: set[Any] = set()

    def __call__(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int) -> None:
        held = tuple(sorted((name, getattr(value, "__name__", None) or str(value)) for name, value in constants.items()))
        self.kinds.add((kernel.fn.__module__, kernel.fn.__name__, self._types(arguments), held, num_warps))

    def _types(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            self._types(one) if isinstance(one, tuple) else one.dtype if isinstance(one, torch.Tensor) else type(one).__name__
            for one in arguments
        )


@pytest.mark.parametrize("codec", ["int8/bf16", "topk:k=0.1", "int8:momentum=nesterov", "shared"])
def test_what_a_job_launches_has_been_launched_by_warming(codec: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Over servers, and among workers where the codec has no state; one part by itself, and several of other lengths together."""
    from psgc.cuda.common import launching
    from psgc.launch.job import gpu_warming as warming

    ahead, launched = Launched(), Launched()
    monkeypatch.setattr(warming, "SHAPES", ((17, 20), (7,)))
    monkeypatch.setattr(warming, "NUMEL", 347)
    monkeypatch.setattr(launching, "observers", [ahead])
    assert warming.warm(codec, device)
    monkeypatch.setattr(launching, "observers", [launched])
    for dtype in ("float32", "bfloat16"):
        runtime = KernelRuntime()
        use_recorded(runtime)
        bucket = Bucket(one_bucket(codec, [(19, 11), (3,)], dtype), runtime)
        for dropped in (False, True):
            bucket.step([torch.ones(19, 11, dtype=getattr(torch, dtype)), torch.ones(3, dtype=getattr(torch, dtype))], dropped=dropped)
        if "momentum" not in codec and codec != "shared":
            with Connected((2,), made=KernelRuntime) as there:
                played([SHARED], codec, getattr(torch, dtype), there.runtime, (2,), there.job, 213)
            for side in dict.fromkeys(codec.split("/")):
                several(Pair(side, device, dtype), getattr(torch, dtype))
    assert len(launched.kinds) > 3
    assert not launched.kinds - ahead.kinds, sorted(map(str, launched.kinds - ahead.kinds))


def several(pair: Pair, dtype: torch.dtype) -> None:
    """Parts that are encoded and decoded together."""
    encodings, decodings = [], []
    for numel in (20, 213):
        residual = torch.zeros(numel) if pair.codec.feedback else None
        grad, out = torch.ones(numel, dtype=dtype), pair.out(numel)
        encodings.append(Encoding(grad, residual, 0.5, STREAM, out, status(pair.device), pair.scratch(numel)))
        decodings.append(Decoding([out], numel, grad))
        if residual is not None:
            decodings.append(Decoding([out], numel, residual, "commit", grad, 0.5))
    pair.side.encode_many(encodings)
    pair.side.decode_many([item for item in decodings if item.use == "commit"])
    pair.side.decode_many([item for item in decodings if item.use == "decode"])


def test_codecs_without_kernels_are_told_from_those_with_and_unknown_ones_are_refused(device: torch.device) -> None:
    from psgc.launch.job import gpu_warming as warming

    class Bare(Int8Codec):
        """Has no row among the GPU sides."""

        name = "bare"
        codec_id = 250

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warming, "parse_scheme", lambda text, context: PairScheme(CodecPair(Bare(), Bare())))
        assert not warming.warm("bare", device)
    with pytest.raises(CodecError, match="unknown codec 'int9'"):
        warming.warm("int9", device)
