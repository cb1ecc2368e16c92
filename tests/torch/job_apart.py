"""A worker that broadcasts parameters which are equal on all ranks, or not, and prints how many bytes each took. Run by test_digests.py. "more": rank 1 has
another tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import psgc.torch as psgc
from psgc.torch.session import api

COUNT = 11
SIDE = 320  # 409,600 bytes each


def tensors_of(seeds: list[int]) -> dict[str, torch.Tensor]:
    return {
        f"t{number}": torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(100 * seed + number))
        for number, seed in enumerate(seeds)
    }


def told(case: str, call: Callable[[], object]) -> None:
    psgc.barrier()
    before = api.current_session().statistics()["wire_bytes"]
    call()
    psgc.barrier()
    print(f"{case}: {api.current_session().statistics()['wire_bytes'] - before} bytes", flush=True)


def broadcast(case: str, seeds: list[int]) -> None:
    tensors = tensors_of(seeds)
    told(case, lambda: psgc.broadcast_parameters(tensors))
    assert all(torch.equal(tensors[name], wanted) for name, wanted in tensors_of([0] * COUNT).items()), case


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    rank = psgc.rank()
    if "more" in sys.argv:
        psgc.broadcast_parameters({"a": torch.ones(3), **({"more": torch.ones(3)} if rank else {})})
    psgc.push_pull(torch.ones(1), name="first")  # what is declared first has the links measured
    broadcast("equal", [0] * COUNT)
    broadcast("equal again", [0] * COUNT)
    broadcast("one differs", [0, 0, 0, rank, *[0] * (COUNT - 4)])
    broadcast("all differ", [rank] * COUNT)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors_of([0] * COUNT).values()]
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    told("equal states", lambda: psgc.broadcast_optimizer_state(adam))
    model = torch.nn.ParameterList(parameters)
    told("diloco", lambda: psgc.DiLoCo(model, adam, every=10))
    psgc.shutdown()


if __name__ == "__main__":
    main()
