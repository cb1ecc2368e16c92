"""What PowerSGD's rank costs: the GPT task of quality.py under variants of it, and under torch's own PowerSGD.

    python benchmarks/lowrank.py [--seeds 1,2,3] [--only torch,warm-up] [--sgd 0.3]

One process: PowerSGD is linear, so compressing one worker's mean gradient equals compressing two workers' gradients. The codec's own rounds run on
each tensor of two dimensions; all others are left uncompressed. The learning rate is the best of quality.py's grid for AdamW, 0.006, for all.
Prints a table; "share" is how much of the square of gradient + residual was sent, over all matrices and the last 50 steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt_model import Gpt, GptConfig  # noqa: E402 - the examples are no package
from text_data import batch_of, load_text  # noqa: E402
from train_gpt import validation_loss  # noqa: E402

from psgc.codecs import BucketContext, Stream, parse_scheme  # noqa: E402
from psgc.codecs.catalogue import answered  # noqa: E402

STEPS, WORKERS, BATCH, LR, BETAS = 300, 2, 8, 6e-3, (0.9, 0.95)
CONFIG = GptConfig(context=64, width=64, layers=2)
LAST = 50


@dataclass(frozen=True)
class Variant:
    """title: its first word is what --only takes. warmup: steps without compression. leave: in names of tensors that travel as they are."""

    title: str
    codec: str
    warmup: int = 0
    leave: tuple[str, ...] = ()


VARIANTS = (
    Variant("none", "none"),
    Variant("rank4", "powersgd:rank=4"),
    Variant("torch, rank 4", "torch"),
    Variant("rank8", "powersgd:rank=8"),
    Variant("rank16", "powersgd:rank=16"),
    Variant("embeddings as they are, rank 4", "powersgd:rank=4", leave=("embed", "position")),
    Variant("warm-up of 30 steps, rank 4", "powersgd:rank=4", warmup=30),
    Variant("warmer: 150 steps, rank 4", "powersgd:rank=4", warmup=150),
    Variant("forgetful: no feedback, rank 4", "powersgd:rank=4,ef=0"),
)


class Compressed:
    """A codec's rounds on the gradients of a model's matrices, with a residual each."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self._variant, self._seed, self._states = variant, seed, dict[str, tuple[Any, Any]]()
        self.shares: list[float] = []

    def __call__(self, step: int, model: nn.Module) -> None:
        sent = left = 0.0
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() < 2 or step <= self._variant.warmup or any(word in name for word in self._variant.leave):
                continue
            assert parameter.grad is not None
            grad = parameter.grad.numpy().reshape(-1)
            if name not in self._states:
                scheme = parse_scheme(self._variant.codec, BucketContext(shapes=(tuple(parameter.shape),)))
                self._states[name] = scheme.new_state(grad.size), np.zeros(grad.size, np.float32) if scheme.feedback else None
            state, residual = self._states[name]
            whole = grad + (0 if residual is None else residual)
            payloads: list[Any] = []
            for number, round_ in enumerate(state.rounds):
                out = np.empty(round_.pair.push.payload_bound(round_.numel), np.uint8)
                stream = Stream(self._seed, step, 0, index)
                payloads.append(out[: state.encode(number, grad, residual, 1.0, stream, out).payload_bytes])
                answer = answered(round_, payloads[-1:])
                if number < len(state.rounds) - 1:
                    state.take(number, answer)
                else:
                    state.apply(answer, payloads, grad, residual, 1.0)
            sent, left = sent + float(np.square(grad).sum()), left + float(np.square(whole - grad).sum())
        self.shares.append(sent / (sent + left) if sent + left else 1.0)


def train(variant: Variant, seed: int, text: tuple[torch.Tensor, torch.Tensor], sgd: float | None) -> tuple[float, float]:
    """(validation loss, share of the last steps). sgd: the learning rate of SGD with momentum, which then is in AdamW's place."""
    torch.manual_seed(seed)
    model = Gpt(CONFIG)
    module: nn.Module = model
    compress: Callable[[int, nn.Module], None] = Compressed(variant, seed)
    if variant.codec == "torch":  # with what it calls a warm-up as short as it lets it be: the first step
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1)
        module = nn.parallel.DistributedDataParallel(model)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS)
    if sgd is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=sgd, momentum=0.9)
    warm_up = STEPS // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up) * max(0.1, 1 - step / STEPS))
    generators = [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(WORKERS)]
    for step in range(1, STEPS + 1):
        batches = [batch_of(text[0], BATCH, CONFIG.context, generator) for generator in generators]
        x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(module(x).flatten(0, 1), y.flatten()).backward()
        if variant.codec not in ("none", "torch"):
            compress(step, model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    shares = compress.shares[-LAST:] if isinstance(compress, Compressed) else []
    return validation_loss(model, text[1], CONFIG.context), statistics.fmean(shares) if shares else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="with commas")
    parser.add_argument("--only", help="first words of titles, with commas; default all, and always none")
    parser.add_argument("--sgd", type=float, metavar="RATE", help="SGD with momentum 0.9 at this rate instead of AdamW")
    options = parser.parse_args()
    torch.set_num_threads(1)
    only = set(options.only.split(",")) if options.only else None
    chosen = [variant for variant in VARIANTS if not only or variant.codec == "none" or variant.title.split()[0].strip(",:") in only]
    text, plain = load_text(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        print("| variant | validation loss, by seed | mean | against none | share |\n|---|---|---|---|---|")
        for variant in chosen:
            runs = [train(variant, int(seed), text, options.sgd) for seed in options.seeds.split(",")]
            losses = [loss for loss, _ in runs]
            plain = plain or losses
            distance = statistics.fmean(losses) - statistics.fmean(plain)
            share = statistics.fmean(share for _, share in runs)
            sent = "" if math.isnan(share) else f"{share:.0%}"
            print(f"| {variant.title} | {', '.join(f'{loss:.4f}' for loss in losses)} | {statistics.fmean(losses):.4f} "
                  f"| {distance:+.4f} | {sent} |", flush=True)  # fmt: skip
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
