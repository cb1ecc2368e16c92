"""A worker of a job that trains an example of examples/ddp_*.py as it would be without psgc, then under psgc's hook. Prints a line of JSON
for each training. Run by test_libraries.py: job.py EXAMPLE OPTIONS CODEC...
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import psgc.torch as psgc

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


def measured(example: Any, options: dict[str, Any], hook: Any) -> dict[str, Any]:
    """One training. reduced: bytes that gloo's all-reduces carried, of four bytes an element; carried: payloads of gradients that this
    worker sent and received."""
    before = psgc.current_session().statistics()["gradient_bytes"]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        model, losses = example.train(**options)
    reductions = [event.input_shapes for event in seen.events() if event.name == "gloo:all_reduce"]
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "rank": psgc.rank(), "losses": losses, "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "parameter_bytes": 4 * flat.numel(),
        "reduced": sum(4 * torch.Size(shape).numel() for shapes in reductions for shape in shapes if shape),
        "carried": psgc.current_session().statistics()["gradient_bytes"] - before, **(hook.statistics() if hook is not None else {}),
    }  # fmt: skip


def main() -> None:
    name, options, *codecs = sys.argv[1:]
    torch.set_num_threads(1)
    psgc.init()
    example = importlib.import_module(name)
    if name == "ddp_plain":
        dist.init_process_group("gloo")
    for codec in ("stock", *codecs):
        gc.collect()
        hook = None if codec == "stock" else psgc.ddp_hook(codec).install()
        print(json.dumps({"codec": codec, **measured(example, json.loads(options), hook)}), flush=True)
    psgc.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
