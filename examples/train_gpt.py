"""Train a byte-level GPT on Python's own source code.  psgc run --workers 2 -- python examples/train_gpt.py --codec int8"""

from __future__ import annotations

import argparse

import torch
from gpt_model import Gpt, GptConfig
from optimizers import OPTIMIZERS, end_training, make_optimizer, plain_optimizer
from reporting import Report
from text_data import batch_of, load_text
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc


def validation_loss(model: Gpt, text: torch.Tensor, context: int) -> float:
    """Mean loss in nats a byte over fixed places of the validation files."""
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    with torch.no_grad():
        for _ in range(8):
            x, y = batch_of(text, 16, context, generator)
            total += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return total / 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--codec", default=None, help="push/pull codec; default PSGC_CODEC, else none")
    parser.add_argument("--width", type=int, default=GptConfig.width)
    parser.add_argument("--layers", type=int, default=GptConfig.layers)
    parser.add_argument("--context", type=int, default=GptConfig.context)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where rank 0 writes its JSON record")
    parser.add_argument(
        "--ddp", action="store_true", help="wrap the model in DistributedDataParallel, with psgc's hook; sgd, adamw or lion"
    )
    options = parser.parse_args()

    psgc.init()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    config = GptConfig(context=options.context, width=options.width, layers=options.layers)
    model = Gpt(config)
    psgc.broadcast_parameters(model.state_dict(), root_rank=0)
    codec = options.codec or psgc.current_session().config.codec
    trained: torch.nn.Module = model
    if options.ddp:
        psgc.ddp_hook(options.codec).install()
        dist.init_process_group("gloo")
        trained, optimizer = DistributedDataParallel(model), plain_optimizer(options.optimizer, model, options.lr)
    else:
        optimizer = make_optimizer(options.optimizer, model, options.lr, codec, options.steps)
    warm_up = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * max(0.1, 1 - step / options.steps)
    )
    train, validation = load_text()
    generator = torch.Generator().manual_seed(options.seed * 1000 + psgc.rank())
    report = Report("gpt", codec, options.steps, options.out)
    for step in range(1, options.steps + 1):
        x, y = batch_of(train, options.batch, config.context, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(trained(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report.step(step, loss)
    end_training(optimizer)
    report.finish(validation_loss(model, validation, config.context))
    if options.ddp:
        dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
