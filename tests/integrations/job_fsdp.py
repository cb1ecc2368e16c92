"""A worker of four that trains under FSDP2 as a library sets it up, first with FSDP's average between two nodes of two ranks, then with psgc's. Prints a line
of JSON for each training. Run by test_fsdp_libraries.py: job_fsdp.py WHICH CODEC...
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import psgc.torch as psgc

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


def lightning(codec: str) -> tuple[nn.Module, list[float]]:
    import fsdp_lightning

    if codec not in ("stock", "none"):
        fsdp_lightning.psgc = SimpleNamespace(fsdp_hook=lambda model: psgc.fsdp_hook(model, codec))  # type: ignore[attr-defined]
    found: tuple[nn.Module, list[float]] = fsdp_lightning.train(hooked=codec != "stock")
    return found


def accelerate(codec: str) -> tuple[nn.Module, list[float]]:
    """A transformers model, prepared by the function that Accelerator.prepare() and Trainer call: they themselves take FSDP on accelerators alone."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
    parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), parallelism_config=parallelism, torch_device_mesh=parallelism.build_device_mesh("cpu"),
        device=torch.device("cpu"), mixed_precision="no", is_main_process=dist.get_rank() == 0,
    )  # fmt: skip
    model = fsdp2_prepare_model(accelerator, LlamaForCausalLM(config))
    if codec != "stock":
        psgc.fsdp_hook(model, codec)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(8):
        tokens = (torch.randint(0, 64, (4, 1), generator=draw) + torch.arange(16)) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def main() -> None:
    which, *codecs = sys.argv[1:]
    torch.set_num_threads(1)
    psgc.init()
    dist.init_process_group("gloo")
    for codec in ("stock", *codecs):
        before = psgc.current_session().statistics()["gradient_bytes"]
        model, losses = {"lightning": lightning, "accelerate": accelerate}[which](codec)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.to_local().detach().numpy().tobytes())  # type: ignore[attr-defined]
        carried = psgc.current_session().statistics()["gradient_bytes"] - before
        told = {"codec": codec, "rank": psgc.rank(), "losses": losses, "digest": digest.hexdigest(), "carried": carried}
        print(json.dumps(told), flush=True)
    psgc.barrier()


if __name__ == "__main__":
    main()
