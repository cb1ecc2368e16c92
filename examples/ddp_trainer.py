"""Hugging Face Trainer over psgc: psgc run --workers 2 --servers 1 --codec int8 -- python examples/ddp_trainer.py

The model is built from a configuration, the data are numbers: nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import psgc.torch as psgc


class Counting(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences that count up from somewhere, in steps of 1 to 3."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (7 * index + torch.arange(16) * (1 + index % 3)) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(steps: int = 8, accumulate: int = 1, clip: float = 1.0) -> tuple[nn.Module, list[float]]:
    """The trained model, and the losses that Trainer logged."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=accumulate,
            max_grad_norm=clip, learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
        trainer.train()
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    psgc.ddp_hook().install()  # the one line: before Trainer wraps the model
    print(f"losses {train()[1]}")
