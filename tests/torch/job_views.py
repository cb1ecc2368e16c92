"""A worker of a real job that trains with p.grad as views of buckets' memory and without, by several codecs. Run by test_views.py."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import psgc.torch as psgc

SHAPES = [(300, 200), (7,), (513, 64), (1,), (129,), (40_000,), (200, 33)]
CODECS = ("none", "int8", "onebit", "none/int8", "bf16")


def train(codec: str, set_to_none: bool, views: bool) -> str:
    """Digest of all means and weights. Some gradients do not exist in some steps, on one rank or on all."""
    drawn = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9), [(f"{codec}.{number}", p) for number, p in enumerate(parameters)], compression=codec,
        gradient_as_bucket_view=views,
    )  # fmt: skip
    digest, batches = hashlib.sha256(), torch.Generator().manual_seed(psgc.rank())
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        absent = {2} if step == 3 else {4} if step == 2 and psgc.rank() else set()
        used = [p for number, p in enumerate(parameters) if number not in absent]
        sum((p * torch.randn(p.shape, generator=batches)).sum() for p in used).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 10.0)
        for parameter in parameters:
            digest.update(b"" if parameter.grad is None else parameter.grad.numpy().tobytes())
        optimizer.step()
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for codec in CODECS:
        for set_to_none in (True, False):
            without, views = (train(codec, set_to_none, views) for views in (False, True))
            print(codec, "the same" if without == views else f"{without} {views}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
