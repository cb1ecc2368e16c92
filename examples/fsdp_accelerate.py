"""Accelerate's FSDP2 plug-in: sharded within nodes, and psgc between them, here as two nodes of two ranks on one machine:
psgc run --workers 4 --servers 1 --codec int8 -- python examples/fsdp_accelerate.py

Accelerate prepares such models on accelerators only. Where there is none, this calls the function by which it shards them, so that it can be tried.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import psgc.torch as psgc

OF_A_NODE = 2  # ranks


def prepared(model: nn.Module, ranks: int) -> nn.Module:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
    parallelism = ParallelismConfig(dp_replicate_size=ranks // OF_A_NODE, dp_shard_size=OF_A_NODE)
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin, parallelism_config=parallelism).prepare(model)  # type: ignore[no-any-return]
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), parallelism_config=parallelism, torch_device_mesh=parallelism.build_device_mesh("cpu"),
        device=torch.device("cpu"), mixed_precision="no", is_main_process=dist.get_rank() == 0,
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)  # type: ignore[no-any-return]


def train(steps: int = 8, workers: int = 4, hooked: bool = True) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses. hooked: by psgc between the nodes, else by FSDP itself."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = prepared(LlamaForCausalLM(config), workers)
    if hooked:
        psgc.fsdp_hook(model)  # the one line: when Accelerate has prepared the model
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    device = next(model.parameters()).device
    for _ in range(steps):
        tokens = ((torch.randint(0, 64, (4, 1), generator=draw) + torch.arange(16)) % 64).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    psgc.init()
    dist.init_process_group()
    print(f"rank {psgc.rank()}: losses {[round(loss, 4) for loss in train(workers=psgc.size())[1]]}")
