"""A worker of four that trains under FSDP2 as a library sets it up, first with FSDP's average between two nodes of two ranks, then with psgc's. Prints a line
of JSON for each training. Run by test_fsdp_libraries.py: job_fsdp.py WHICH CODEC...
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import psgc.torch as psgc

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


def trained(which: str, codec: str) -> tuple[nn.Module, list[float]]:
    """By the example of that library."""
    example = importlib.import_module(f"fsdp_{which}")
    if codec not in ("stock", "none"):
        example.psgc = SimpleNamespace(fsdp_hook=lambda model: psgc.fsdp_hook(model, codec))  # type: ignore[attr-defined]
    found: tuple[nn.Module, list[float]] = example.train(hooked=codec != "stock")
    return found


def main() -> None:
    which, *codecs = sys.argv[1:]
    torch.set_num_threads(1)
    psgc.init()
    dist.init_process_group("gloo")
    for codec in ("stock", *codecs):
        before = psgc.current_session().statistics()["gradient_bytes"]
        model, losses = trained(which, codec)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.to_local().detach().numpy().tobytes())  # type: ignore[attr-defined]
        carried = psgc.current_session().statistics()["gradient_bytes"] - before
        told = {"codec": codec, "rank": psgc.rank(), "losses": losses, "digest": digest.hexdigest(), "carried": carried}
        print(json.dumps(told), flush=True)
    psgc.barrier()


if __name__ == "__main__":
    main()
