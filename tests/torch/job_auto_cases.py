"""A worker of a real job whose trainings are as users write them, each under ``auto`` and uncompressed. Run by test_auto_cases.py.

job_auto_cases.py CASE...  trains in each case, and prints the choices in order, the last losses under auto and uncompressed, and a digest of the weights.

auto takes its times from a table (auto_table.py), so that every case switches, and to the same, whatever the machine; everything else is real.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import psgc.torch as psgc
from tests.torch.auto_table import TIMES, Table, choice_of, used

Losses = list[float]


class Loop:
    """One training's optimizers, choices and losses. kind: of compression, "auto" or "none"."""

    def __init__(self, kind: str, table: Table) -> None:
        self.table = table
        self.kind, self.losses, self.seen = kind, list[float](), list[str]()
        self.generator = torch.Generator().manual_seed(1 + psgc.rank())
        self.modules: list[nn.Module] = []

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Any:
        self.modules.append(model)
        return psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=self.kind, **options)

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def backward(self, loss: torch.Tensor, *optimizers: Any, share: float = 1.0) -> None:
        """share: of a step's time, until these gradients have arrived."""
        ms = sum(TIMES[choice_of(optimizer._psgc_gradients.exchange)] for optimizer in optimizers)
        self.table.passes(ms * share)
        loss.backward()
        self.losses.append(float(loss.detach()))
        if optimizers:
            self.seen.append(choice_of(optimizers[0]._psgc_gradients.exchange))

    @property
    def digest(self) -> str:
        flat = [p.detach().float().reshape(-1) for module in self.modules for p in module.parameters()]
        return hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()


def net(width: int = 32, outputs: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


def target(x: torch.Tensor) -> torch.Tensor:
    return x[:, :8].sin()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - target(x)).square().mean()


def plain(loop: Loop, steps: int = 45, model: nn.Module | None = None) -> None:
    model = model or net()
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for _ in range(steps):
        optimizer.zero_grad()
        loop.backward(loss_of(model, loop.batch(16, 16)), optimizer)
        optimizer.step()


def short(loop: Loop) -> None:
    """The data end before auto has measured."""
    plain(loop, 7)


def exactly_measured(loop: Loop) -> None:
    """They end with the step in which the table of step times leaves, and nobody takes it."""
    plain(loop, 8)


def lora(loop: Loop) -> None:
    """PEFT's adapters on a transformer, whose other parameters are frozen."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    trained = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
    optimizer = loop.wrap(torch.optim.AdamW(trained, lr=1e-2), trained)
    for _ in range(45):
        tokens = torch.randint(0, 8, (4, 16), generator=loop.generator)
        optimizer.zero_grad()
        loop.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
        optimizer.step()


def gan(loop: Loop) -> None:
    """The loop of PyTorch's DCGAN tutorial: the discriminator has three backwards an iteration, of which one is thrown away."""
    torch.manual_seed(0)
    halves = (
        nn.Sequential(nn.Linear(3, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)),
        nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3)),
    )
    d, g = halves
    d_step, g_step = (loop.wrap(torch.optim.Adam(half.parameters(), lr=1e-3), half) for half in halves)
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(70):
        real, noise = loop.batch(8, 3), loop.batch(8, 2)
        d.zero_grad()
        loop.backward(criterion(d(real).view(-1), torch.ones(8)), d_step, share=0.2)
        fake = g(noise)
        loop.backward(criterion(d(fake.detach()).view(-1), torch.zeros(8)), d_step, share=0.5)
        d_step.step()
        g.zero_grad()
        loop.backward(criterion(d(fake).view(-1), torch.ones(8)), d_step, g_step, share=0.3)
        g_step.step()


def accumulation(loop: Loop) -> None:
    """Micro-batches: of backward_passes_per_step, in no_sync(), each of them sent; and their number changes."""
    model = net()
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model, backward_passes_per_step=2)
    for step in range(80):
        optimizer.zero_grad()
        if step == 25:
            optimizer.set_backward_passes_per_step(1)
        for number in range(2):
            held = optimizer.no_sync() if 25 <= step < 50 and not number else contextlib.nullcontext()
            with held:
                loop.backward(loss_of(model, loop.batch(8, 16)) / 2, optimizer, share=0.5)
        optimizer.step()


def checkpointing(loop: Loop) -> None:
    model = net()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle: Any = checkpoint(self.model[:3], x, use_reentrant=False)
            return self.model[3:](middle)  # type: ignore[no-any-return]

    plain(loop, model=Checkpointed())


def unfreezing(loop: Loop) -> None:
    """Layers come to be trained one after the other: while auto measures, tries, and watches."""
    model = net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for step in range(110):
        if step in (10, 60):
            model[2 if step == 10 else 0].requires_grad_(True)
        optimizer.zero_grad()
        loop.backward(loss_of(model, loop.batch(16, 16)), optimizer)
        optimizer.step()


def scaled(loop: Loop) -> None:
    """A loss scaler that skips steps: at first, since its scale is too high, and now and then."""
    model = net()
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=15)
    begun = float(loss_of(model, loop.batch(256, 16)).detach())
    for step in range(60):
        optimizer.zero_grad()
        x = loop.batch(16, 16) * (float("inf") if step % 9 == 8 and psgc.rank() == 1 else 1.0)
        loop.backward(scaler.scale(loss_of(model, x)), optimizer)
        scaler.step(optimizer)
        scaler.update()
    loop.losses = [begun, *[float(loss_of(model, loop.batch(256, 16)).detach())] * 10]


def one_tensor(loop: Loop) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False)
    plain(loop, model=model)


def bf16(loop: Loop) -> None:
    model = net().to(torch.bfloat16)
    optimizer = loop.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(45):
        x = loop.batch(16, 16).to(torch.bfloat16)
        optimizer.zero_grad()
        loop.backward(loss_of(model, x).float(), optimizer)
        optimizer.step()


def raising(loop: Loop) -> None:
    """A backward raises on one rank, and every rank drops that step."""
    model = net()
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for step in range(50):
        optimizer.zero_grad()
        loss = loss_of(model, loop.batch(16, 16))
        if step in (4, 21) and psgc.rank() == 1:
            hook = model[2].weight.register_hook(_fail)
            with contextlib.suppress(RuntimeError):
                loop.backward(loss, optimizer)
            hook.remove()
            continue
        loop.backward(loss, optimizer)
        if step in (4, 21):
            optimizer.put_back()
        else:
            optimizer.step()


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("for once")


class Based(torch.optim.Optimizer):
    """Wraps an optimizer, which the script steps by itself, as SAM's second call does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.AdamW(self.param_groups, lr=3e-3)


def based(loop: Loop) -> None:
    model = net()
    optimizer = loop.wrap(Based(model.parameters()), model)
    for _ in range(45):
        optimizer.zero_grad()
        loop.backward(loss_of(model, loop.batch(16, 16)), optimizer)
        optimizer.base.step()


def by_hand(loop: Loop) -> None:
    """Updates of the script's own."""
    model = net()
    optimizer = loop.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(45):
        for parameter in model.parameters():
            parameter.grad = None
        loop.backward(loss_of(model, loop.batch(16, 16)), optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)


def resumed(loop: Loop) -> None:
    """A training is saved in the middle, and taken up by another optimizer, whose auto begins anew."""
    model = net()
    optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for part in range(2):
        for _ in range(37):
            optimizer.zero_grad()
            loop.backward(loss_of(model, loop.batch(16, 16)), optimizer)
            optimizer.step()
        if not part:
            saved = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()), saved)
            weights, moments, residuals = torch.load(io.BytesIO(saved.getvalue()))
            model = net(width=32)
            model.load_state_dict(weights)
            loop.modules.clear()
            optimizer = loop.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
            optimizer.load_state_dict(moments)
            optimizer.load_residual_state_dict(residuals)


CASES: dict[str, Callable[[Loop], None]] = {
    case.__name__: case
    for case in (
        plain, short, exactly_measured, lora, gan, accumulation, checkpointing, unfreezing, scaled, one_tensor, bf16, raising, resumed, based, by_hand,
    )
}  # fmt: skip


def tail(losses: Losses) -> float:
    return sum(losses[-10:]) / len(losses[-10:])


def groups(seen: list[str]) -> Iterator[str]:
    return (name for name, _ in groupby(seen))


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    table = used()
    for case in sys.argv[1:]:
        began = time.monotonic()
        loops = [Loop("auto", table), Loop("none", table)]
        for loop in loops:
            CASES[case](loop)
        mine, reference = loops
        assert psgc.broadcast_object(mine.digest) == mine.digest, f"{case}: rank {psgc.rank()} has other weights than rank 0"
        print(
            f"case {case}: {' '.join(groups(mine.seen))}; losses {tail(mine.losses):.5f} {tail(reference.losses):.5f}; from {reference.losses[0]:.5f}; "
            f"weights {mine.digest}; {time.monotonic() - began:.1f} s", flush=True,
        )  # fmt: skip
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
