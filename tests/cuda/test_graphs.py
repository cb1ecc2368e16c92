"""What a captured CUDA graph needs of encoding: nothing that it launches depends on the step, and nothing is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from psgc.codecs.codec import Stream
from psgc.codecs.common.streams import stream_position
from psgc.codecs.randomk import RandomKCodec, shared_stream
from tests.cuda.against_cpu import RESCALE, STREAM, Pair, assert_same, status, tensor, values

DRAWING = ("int8:ef=0", "dithering:partition=natural", "randomk:ef=0,k=0.1")
TEXTS = (
    *DRAWING, "int4", "fp8:ef=0", "tbq", "onebit", "onebit:ef=0,scale=unit", "bf16", "none", "topk:k=0.1", "topk:k=0.1,select=sampled",
    "topk:k=0.1,select=mstopk", "blocktopk:k=0.5",
)  # fmt: skip
IN_PLACE = {"view", "slice", "select", "zero_", "fill_", "copy_", "detach", "alias"}


class Operations(TorchDispatchMode):
    """Names of torch's operators, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.add(operator.overloadpacket.__name__)
        return operator(*arguments, **(named or {}))


def encoding(pair: Pair, numel: int) -> tuple[Callable[[Any], None], torch.Tensor, torch.Tensor]:
    """(what encodes a part with a stream, always to and from the same memory; the payload; the status)."""
    grad, out, state, scratch = tensor(values(numel, 1), pair.device), pair.out(numel), status(pair.device), pair.scratch(numel)
    residual = tensor(values(numel, 2), pair.device) if pair.codec.feedback else None
    rescale = torch.full((1,), RESCALE, device=pair.device)
    return lambda stream: pair.side.encode(grad, residual, rescale, stream, out, state, scratch), out, state


def test_numbers_of_a_step_on_the_device_are_those_of_the_host(device: torch.device) -> None:
    from psgc.cuda.common.tensor_streams import write_words

    words = torch.zeros(3, dtype=torch.int64, device=device)
    for stream in (STREAM, shared_stream(STREAM), Stream(seed=2**64 - 1, step=0, rank=2**32 - 1, bucket=2**32 - 1, first=5, layout=2**31)):
        for step in (0, 1, 77, 2**40 + 3):
            write_words(replace(stream, step=9), torch.tensor([step], device=device), words)
            assert words.tolist() == list(stream_position(replace(stream, step=step), 0))


def test_launches_do_not_depend_on_a_step_that_lies_on_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.cuda.common import launching
    from psgc.cuda.common.tensor_streams import write_words
    from psgc.device.codec import DeviceStream

    launched: list[Any] = []
    monkeypatch.setattr(launching, "observers", [lambda *launch: launched.append(described(launch))])
    words, found = DeviceStream(torch.zeros(3, dtype=torch.int64, device=device)), []
    for text in DRAWING:
        pair = Pair(text, device)
        encode, out, state = encoding(pair, 300)
        stream = shared_stream(STREAM) if isinstance(pair.codec, RandomKCodec) else STREAM
        runs = []
        for step in (4, 2**33):
            launched.clear()
            write_words(stream, torch.tensor([step], device=device), words.words)
            encode(words)
            runs.append(list(launched))
            wanted = pair.cpu_payload(values(300, 1), stream=replace(STREAM, step=step))
            found.append(out.cpu().numpy()[: int(state[1])].tobytes())
            assert_same(out.cpu().numpy()[: int(state[1])], wanted, f"{text}, step {step}")
        assert runs[0] == runs[1] != []
        assert found[-1] != found[-2]


def test_encoding_allocates_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not run: what is left are torch's operators."""
    from psgc.device.codec import DeviceStream

    def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        started.append(kernel)

    started: list[Any] = []
    words = DeviceStream(torch.zeros(3, dtype=torch.int64, device=device))
    for text in TEXTS:
        encode, _, _ = encoding(Pair(text, device), 9000)
        started.clear()
        with monkeypatch.context() as patch, Operations() as operations:
            for module in modules_that_launch():
                patch.setattr(module, "launch", launch)
            encode(words)
        assert operations.names <= IN_PLACE, text
        assert started or text == "none"


@pytest.mark.parametrize("text", [*DRAWING, "int4", "onebit", "bf16", "topk:k=0.1", "topk:k=0.1,select=mstopk", "blocktopk:k=0.5"])
def test_a_captured_graph_encodes_for_the_step_that_it_finds(device: torch.device, text: str) -> None:
    from psgc.cuda.common.tensor_streams import write_words
    from psgc.device.codec import DeviceStream

    if device.type != "cuda":
        pytest.skip("no CUDA device: graphs are captured on a GPU")
    pair, words, step = (
        Pair(text, device),
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    encode, out, state = encoding(pair, 5000)
    stream = shared_stream(STREAM) if isinstance(pair.codec, RandomKCodec) else STREAM

    def whole() -> None:
        write_words(stream, step, words)
        state.zero_()
        encode(DeviceStream(words))

    whole()  # compiles, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        whole()
    for number in (4, 2**33):
        step.fill_(number)
        out.fill_(0xA5)
        graph.replay()
        residual = values(5000, 2) if pair.codec.feedback else None
        wanted = pair.cpu_payload(values(5000, 1), residual, replace(STREAM, step=number))
        flags, size = state.tolist()
        assert flags == 0
        assert_same(out.cpu().numpy()[:size], wanted, f"{text}, step {number}")


def described(launch: Any) -> Any:
    """A launch, with addresses for tensors."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of, value))
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    kernel, programs, arguments, constants, warps = launch
    return kernel, programs, of(arguments), sorted((name, str(value)) for name, value in constants.items()), warps


def modules_that_launch() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("psgc.cuda.") and "launch" in vars(module)]
