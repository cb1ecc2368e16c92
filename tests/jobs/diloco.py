"""A worker that trains a small model by DiLoCo, and beside it by a loop that does the same by hand. Run by tests.

Prints a line for each run: its name, a digest of this rank's parameters at the end, and how far they are from those of the loop.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import CodecError

STEPS = 17


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)  # ranks begin differently: rank 0's parameters count
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))


class RandomFeatures(nn.Module):
    """Of which the random ones are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.randn(12, 5), persistent=False)
        self.register_buffer("shift", torch.randn(5))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.drawn + self.shift) * self.scale


def features(on: Any) -> torch.Tensor:
    """What a model with such features makes of the same input once it is handed out: ranks begin differently."""
    torch.manual_seed(psgc.rank())
    model = RandomFeatures()
    with psgc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1e-2), every=2, on=on):
        pass
    return model(torch.ones(2, 12)).detach()


def inner_step(model: nn.Module, optimizer: Any, draw: torch.Generator, scaler: torch.amp.GradScaler | None = None) -> float:
    """scaler: the same to the bit, since its scale is a power of two."""
    x = torch.randn(16, 12, generator=draw)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def by_hand(name: str, every: int, parts: list[list[int]], delay: int, mix: float, outer: str) -> list[torch.Tensor]:
    """The published algorithm (arXiv 2501.18512, Algorithm 2), with means that everybody waits for; taken as late as they are to come. At the end, what is
    under way is taken, and ranks go on from the mean of their parameters, where they differ: as far from the outer ones as their progress is on average."""
    model = model_of(0)
    inner, draw = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(psgc.rank())
    local = list(model.parameters())
    globals_ = [nn.Parameter(parameter.detach().clone()) for parameter in local]
    settings = {"lr": 1.0} if outer == "average" else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    optimizers = [torch.optim.SGD([globals_[i] for i in part], **settings) for part in parts]
    means: dict[int, list[torch.Tensor]] = {}
    steps_in = [0] * len(parts)  # inner steps in a fragment's parameters that have not been exchanged

    def send(part: int) -> None:
        means[part] = [psgc.push_pull(globals_[i].detach() - local[i].detach(), name=f"{name}.{i}") for i in parts[part]]
        steps_in[part] = 0

    def receive(part: int, keep: float) -> None:
        for i, mean in zip(parts[part], means.pop(part), strict=True):
            globals_[i].grad = mean
        optimizers[part].step()
        with torch.no_grad():
            for i in parts[part]:
                local[i].copy_(globals_[i] + keep * (local[i] - globals_[i]))
        if not keep:
            steps_in[part] = 0

    at = [(part + 1) * every // len(parts) % every for part in range(len(parts))]
    for step in range(1, STEPS + 1):
        inner_step(model, inner, draw)
        steps_in = [count + 1 for count in steps_in]
        for part in [part for part in means if (step - delay) % every == at[part]]:
            receive(part, mix)
        for part in [part for part in range(len(parts)) if step % every == at[part]]:
            send(part)
            if not delay:
                receive(part, mix)
    for part in list(means):
        receive(part, mix)
    for part in [part for part, count in enumerate(steps_in) if count or mix]:
        send(part)
        with torch.no_grad():
            for i, progress in zip(parts[part], means.pop(part), strict=True):
                local[i].copy_(globals_[i] - progress)
    return [parameter.detach() for parameter in local]


Trained = tuple[list[torch.Tensor], list[float]]


def diloco(codec: str, every: int, fragments: int, delay: int, mix: float, outer: str, on: str = "workers") -> Trained:
    return interrupted(codec, every, fragments, delay, mix, outer, on, None)[0]


def interrupted(
    codec: str, every: int, fragments: int, delay: int, mix: float, outer: str, on: str, at: int | None
) -> tuple[Trained, Trained | None]:
    """A run, and one that goes on from the state that it had after ``at`` steps, with what the model and the inner optimizer had: of several fragments, which
    are then in the middle of a round, loaded before DiLoCo is made, and of one after it."""
    model = model_of(psgc.rank())
    inner, draw = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(psgc.rank())
    losses: list[float] = []
    settings: Any = {"every": every, "outer": outer, "fragments": fragments, "delay": delay, "mix": mix, "codec": codec, "on": on}
    saved: Any = None
    with psgc.DiLoCo(model, inner, **settings) as outside:
        for step in range(1, STEPS + 1):
            losses.append(inner_step(model, inner, draw))
            if step == at:
                saved = copy.deepcopy((outside.state_dict(), model.state_dict(), inner.state_dict())), draw.get_state(), list(losses)
    first = [parameter.detach() for parameter in model.parameters()], losses
    if at is None:
        return first, None
    (of_outside, of_model, of_inner), drawn, losses = saved
    draw.set_state(drawn)
    model = model_of(9)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)  # of gradients, and not of what is exchanged
    if fragments > 1:
        model.load_state_dict(of_model)
        inner.load_state_dict(of_inner)
    with psgc.DiLoCo(model, inner, **settings) as outside:
        if fragments == 1:
            model.load_state_dict(of_model)
            inner.load_state_dict(of_inner)
        outside.load_state_dict(of_outside)
        for _ in range(STEPS - at):
            losses.append(inner_step(model, inner, draw, scaler))
    return first, ([parameter.detach() for parameter in model.parameters()], losses)


def drawn(how: str, folder: str, codec: str) -> None:
    """A run whose state is in a file after some steps; or one that goes on from there, in another job."""
    path = f"{folder}/{psgc.rank()}.pt"
    model = model_of(0)
    inner, draw = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(psgc.rank())
    with psgc.DiLoCo(model, inner, every=2, codec=codec, on="servers") as outside:
        if how == "resumed":
            saved = torch.load(path, weights_only=True)
            for each in (model, inner, outside):
                each.load_state_dict(saved.pop())
            draw.set_state(*saved)
        for step in range(1, (9 if how == "whole" else 4) + 1):
            inner_step(model, inner, draw)
            if how == "whole" and step == 5:
                torch.save([draw.get_state(), outside.state_dict(), inner.state_dict(), model.state_dict()], path)
    tell("drawn", ([parameter.detach() for parameter in model.parameters()], [0.0]))


def tell(name: str, trained: Trained, wanted: list[torch.Tensor] | None = None) -> None:
    parameters, losses = trained
    digest = hashlib.sha256(b"".join(parameter.numpy().tobytes() for parameter in parameters)).hexdigest()[:12]
    off = max(float((own - its).abs().max()) for own, its in zip(parameters, wanted, strict=True)) if wanted else -1.0
    print(f"{name} {digest} {off:.2e} {losses[0]:.3f} {losses[-1]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codecs", nargs="*", default=[])
    parser.add_argument("--servers", action="store_true", help="the same with outer steps on servers, too")
    parser.add_argument("--drawn", nargs=3, help="run or go on, by files in a folder, with a codec on servers, and nothing else is trained")
    parser.add_argument("--missing-servers", action="store_true", help="outer steps on servers, and nothing else")
    parser.add_argument("--refused", help="a codec that this job cannot have, and nothing else")
    parser.add_argument("--uneven", action="store_true", help="rank 1 has fewer batches than rank 0, and nothing else is trained")
    parser.add_argument("--apart", help="what is otherwise on rank 1, and nothing else: fragments, codec, model or every")
    parser.add_argument("--nonfinite", action="store_true", help="rank 1 exchanges a NaN, and nothing else is trained")
    parser.add_argument("--features", action="store_true", help="a model whose features are drawn at random, and nothing else")
    given = parser.parse_args()
    psgc.init()
    if given.features:
        for on in ("workers", "servers"):
            tell(on, ([features(on)], [0.0]))
        psgc.shutdown()
        return
    if given.nonfinite:
        model = model_of(0)
        inner = torch.optim.SGD(model.parameters(), lr=1e-2)
        with psgc.DiLoCo(model, inner, every=1, on="servers" if given.servers else "workers"), torch.no_grad():
            inner.step()
            next(iter(model.parameters()))[0, 0] = float("nan") if psgc.rank() else 0.0
            inner.step()
    if given.apart:
        differs = {given.apart} if psgc.rank() else set()
        model = model_of(0) if "model" not in differs else nn.Sequential(nn.Linear(12, 41), nn.Linear(41, 5))
        psgc.DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=1e-2), every=999 if "every" in differs else 1000, fragments=2 if "fragments" in differs else 1,
            codec="int8" if "codec" in differs else "int4", on="servers" if given.servers else "workers",
        )  # fmt: skip
    if given.drawn:
        drawn(*given.drawn)
        return
    if given.missing_servers:
        diloco("none", 4, 1, 0, 0.0, "nesterov", "servers")
    if given.refused:
        model = model_of(0)
        try:
            psgc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1e-2), every=5, codec=given.refused)
        except CodecError as error:
            print(f"refused: {error}", flush=True)
        return
    if given.uneven:
        model = model_of(0)
        inner, draw = torch.optim.SGD(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
        with psgc.DiLoCo(model, inner, every=5):
            for _ in range(12 if psgc.rank() else 20):
                inner_step(model, inner, draw)
        return
    everything = [list(range(6))]
    three = [[0, 1], [2], [3, 4, 5]]
    for name, every, parts, delay, mix, outer in (
        ("local-sgd", 4, everything, 0, 0.0, "average"),
        ("diloco", 5, everything, 0, 0.0, "nesterov"),
        ("streaming", 6, three, 2, 0.25, "nesterov"),
        ("always-travelling", 6, three, 3, 0.0, "nesterov"),
    ):
        wanted = by_hand(name, every, parts, delay, mix, outer)
        tell(name, diloco("none", every, len(parts), delay, mix, outer), wanted)
        if given.servers:
            tell(f"{name}-on-servers", diloco("none", every, len(parts), delay, mix, outer, "servers"), wanted)
    for codec, on in [(codec, on) for codec in given.codecs for on in ("workers", "servers")[: 1 + given.servers]]:
        for how, settings in (("", (4, 1, 0, 0.0)), ("streaming-", (6, 3, 4, 0.25))):
            whole, resumed = interrupted(codec, *settings, "nesterov", on, STEPS // 2)
            assert resumed is not None
            tell(f"{codec}-{how}whole-{on}", diloco(codec, *settings, "nesterov", on))
            tell(f"{codec}-{how}saved-{on}", whole)
            tell(f"{codec}-{how}resumed-{on}", resumed)
    psgc.shutdown()


main()
