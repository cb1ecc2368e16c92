"""A worker of a real job that trains one model by backwards, by graphs that are replayed, and compiled, with its gradients on a recorded device but for the
first time. Prints whether all end with the same weights, and what raced."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.torch.captured_graphs import Graph, Graphed

STEPS = 5


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def train(how: str, codec: str, runtime: RecordingRuntime | None) -> str:
    """Digest of the weights after STEPS steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    for parameter in (
        model.parameters() if runtime is not None else ()
    ):  # the recorder is told of what backward writes before psgc's hooks run
        parameter.register_post_accumulate_grad_hook(lambda p: runtime.trainer_writes([p.grad]))
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), compression=codec
    )
    called: Any = {"graphed": lambda: Graphed(model), "compiled": lambda: torch.compile(model, backend="aot_eager")}.get(
        how, lambda: model
    )()
    graph = Graph(model, loss_of)
    if how == "replayed" and runtime is not None:
        runtime.capturing = True
        with optimizer.no_sync(), graph.capture():
            loss_of(model, torch.zeros(8, 64)).backward()
        runtime.capturing = False
    torch.manual_seed(1 + psgc.rank())
    for _ in range(STEPS):
        x = torch.randn(8, 64)
        if how == "replayed":
            graph.replay(x)
            if runtime is not None:
                runtime.trainer_writes(graph.places)
            optimizer.replayed()
        else:
            optimizer.zero_grad()
            loss_of(called, x).backward()
        optimizer.step()
    return hashlib.sha256(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    wanted = {codec: train("eager", codec, None) for codec in sys.argv[1:]}
    for codec in sys.argv[1:]:
        for how in ("replayed", "graphed", "compiled"):
            runtime = RecordingRuntime()
            use_recorded(runtime, slots=2, slot_bytes=16384)
            same = train(how, codec, runtime) == wanted[codec]
            print(f"{codec} {how} {'same' if same else 'differs'} races {runtime.races.found[:3]}", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
