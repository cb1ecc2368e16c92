"""The six models of Espresso's evaluation (Wang et al., EuroSys 2023) in plain torch, each in a small size and in the paper's, with synthetic data.

Full models have the tensors of ``psgc.plan.inputs.architectures``; a test compares the shapes. A task's ``loss`` draws a batch and returns what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Wrap = Callable[[nn.Module], Any]


@dataclass
class Task:
    """A model that is ready to train. phases: what a step does one after the other: a loss, and the parameters that it moves."""

    modules: list[nn.Module]
    phases: list[tuple[Callable[[torch.Generator], Tensor], list[nn.Parameter]]]

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for module in self.modules for parameter in module.parameters())


# images


def vgg(full: bool) -> nn.Module:
    narrow, side, hidden, classes = (1, 7, 4096, 1000) if full else (16, 1, 32, 10)
    layers: list[nn.Module] = []
    into = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(into, width // narrow, 3, padding=1), nn.ReLU(inplace=True)]
            into = width // narrow
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(into * side**2, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes),
    )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(into, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if stride > 1 or into != 4 * width
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(out)))))
        return F.relu(out + self.downsample(x))


def resnet101(full: bool) -> nn.Module:
    blocks, first, classes = ((3, 4, 23, 3), 64, 1000) if full else ((1, 1, 2, 1), 8, 10)
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 7, 2, 3, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    into = first
    for stage, repeats in enumerate(blocks):
        for block in range(repeats):
            layers.append(Bottleneck(into, first << stage, 2 if stage and not block else 1))
            into = 4 * (first << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, classes))


def images(model: Callable[[bool], nn.Module], full: bool, wrap: Wrap) -> Task:
    pixels, classes, batch = (224, 1000, 32) if full else (32, 10, 4)
    module = model(full)
    run = wrap(module)

    def loss(draw: torch.Generator) -> Tensor:
        x = torch.randn(batch, 3, pixels, pixels, generator=draw)
        return F.cross_entropy(run(x), torch.randint(classes, (batch,), generator=draw))

    return Task([module], [(loss, list(module.parameters()))])


# text


class Layer(nn.Module):
    """A transformer's layer. first: norms come first, as in GPT-2, else last, as in BERT; fused: one product for query, key and value."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.ModuleList([nn.Linear(width, 3 * width)] if causal else [nn.Linear(width, width) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.inner[0](x).chunk(3, -1) if self.causal else [inner(x) for inner in self.inner]
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """GPT-2 (causal, its head is the token embedding), or BERT with a question-answering head."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, width // 64 or 1, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        if not causal:
            self.kind, self.answer = nn.Embedding(2, width), nn.Linear(width, 2)
        for embedding in (each for each in self.modules() if isinstance(each, nn.Embedding)):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1]))
        if not self.causal:
            x = self.norm(x + self.kind((torch.arange(tokens.shape[1]) > tokens.shape[1] // 2).long()))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.word.weight) if self.causal else self.answer(x)


def bert_base(full: bool, wrap: Wrap) -> Task:
    """Where an answer begins and ends."""
    sizes, batch, time = ((30522, 512, 768, 12), 2, 512) if full else ((500, 64, 64, 2), 4, 32)
    module = Transformer(*sizes, causal=False)
    run = wrap(module)

    def loss(draw: torch.Generator) -> Tensor:
        begin, end = run(torch.randint(sizes[0], (batch, time), generator=draw)).unbind(-1)
        wanted = torch.randint(time, (2, batch), generator=draw)
        return F.cross_entropy(begin, wanted[0]) + F.cross_entropy(end, wanted[1])

    return Task([module], [(loss, list(module.parameters()))])


def gpt2(full: bool, wrap: Wrap) -> Task:
    sizes, batch, time = ((50257, 1024, 768, 12), 1, 1024) if full else ((500, 64, 64, 2), 4, 32)
    module = Transformer(*sizes, causal=True)
    run = wrap(module)

    def loss(draw: torch.Generator) -> Tensor:
        tokens = torch.randint(sizes[0], (batch, time + 1), generator=draw)
        return F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Task([module], [(loss, list(module.parameters()))])


class WordLstm(nn.Module):
    """Two LSTMs, and an output layer that shares the embedding's weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.decoder.weight)
        for rnn in self.rnns:
            x = F.dropout(rnn(x)[0], 0.3, self.training)
        return self.decoder(x)


def lstm(full: bool, wrap: Wrap) -> Task:
    vocabulary, width, batch, time = (33278, 1500, 20, 80) if full else (500, 32, 4, 10)
    module = WordLstm(vocabulary, width)
    run = wrap(module)

    def loss(draw: torch.Generator) -> Tensor:
        tokens = torch.randint(vocabulary, (batch, time + 1), generator=draw)
        return F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Task([module], [(loss, list(module.parameters()))])


# images from images


class Blend(nn.Module):
    """Instance norm and layer norm, blended by ``rho``. own: it has a scale and a shift of its own; else they are given (AdaLIN)."""

    def __init__(self, width: int, own: bool) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.full((width,), 0.0 if own else 0.9))
        if own:
            self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        rho = self.rho.clamp(0, 1).view(1, -1, 1, 1)
        blended = rho * F.instance_norm(x) + (1 - rho) * F.layer_norm(x, x.shape[1:])
        if gamma is None or beta is None:
            gamma, beta = self.gamma.unsqueeze(0), self.beta.unsqueeze(0)
        return blended * gamma[:, :, None, None] + beta[:, :, None, None]


class Attention(nn.Module):
    """U-GAT-IT's class activation map: features weighted by what tells the two domains apart, by average and by maximum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gap_fc, self.gmp_fc = nn.Linear(width, 1, bias=False), nn.Linear(width, 1, bias=False)
        self.conv1x1 = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features, and both logits [batch, 2] of the domain."""
        logits = torch.cat([self.gap_fc(x.mean((2, 3))), self.gmp_fc(x.amax((2, 3)))], 1)
        weighted = [x * fc.weight[:, :, None, None] for fc in (self.gap_fc, self.gmp_fc)]
        return F.relu(self.conv1x1(torch.cat(weighted, 1))), logits


class Generator(nn.Module):
    def __init__(self, width: int, pixels: int) -> None:
        super().__init__()
        wide = 4 * width
        self.down = nn.ModuleList([
            nn.Conv2d(3, width, 7, 1, 3, bias=False), nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.Conv2d(2 * width, wide, 3, 2, 1, bias=False)
        ])  # fmt: skip
        self.res = nn.ModuleList(nn.Conv2d(wide, wide, 3, 1, 1, bias=False) for _ in range(8))
        self.attention = Attention(wide)
        self.style = nn.Sequential(
            nn.Flatten(), nn.Linear((pixels // 4) ** 2 * wide, wide, bias=False), nn.ReLU(), nn.Linear(wide, wide, bias=False), nn.ReLU()
        )
        self.gamma, self.beta = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.up1 = nn.ModuleList(nn.Conv2d(wide, wide, 3, 1, 1, bias=False) for _ in range(8))
        self.norm1 = nn.ModuleList(Blend(wide, own=False) for _ in range(8))
        self.up2 = nn.ModuleList([nn.Conv2d(wide, 2 * width, 3, 1, 1, bias=False), nn.Conv2d(2 * width, width, 3, 1, 1, bias=False)])
        self.norm2 = nn.ModuleList([Blend(2 * width, own=True), Blend(width, own=True)])
        self.last = nn.Conv2d(width, 3, 7, 1, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image in the other domain, and the logits of the domain of ``x``."""
        for down in self.down:
            x = F.relu(F.instance_norm(down(x)))
        for first, second in zip(self.res[::2], self.res[1::2], strict=True):
            x = x + F.instance_norm(second(F.relu(F.instance_norm(first(x)))))
        x, logits = self.attention(x)
        style = self.style(x)
        gamma, beta = self.gamma(style), self.beta(style)
        for at in range(0, len(self.up1), 2):
            inner = F.relu(self.norm1[at](self.up1[at](x), gamma, beta))
            x = x + self.norm1[at + 1](self.up1[at + 1](inner), gamma, beta)
        for up, norm in zip(self.up2, self.norm2, strict=True):
            x = F.relu(norm(up(F.interpolate(x, scale_factor=2.0))))
        return torch.tanh(self.last(x)), logits


class Discriminator(nn.Module):
    """layers: 7 looks at large patches, 5 at small ones. The original's spectral norms are left out: they change no gradient's size."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [3, *(width << layer for layer in range(layers - 1))]
        self.convs = nn.ModuleList(
            nn.Conv2d(into, out, 4, 1 if at == layers - 2 else 2, 1) for at, (into, out) in enumerate(pairwise(widths))
        )
        self.attention = Attention(widths[-1])
        self.last = nn.Conv2d(widths[-1], 1, 4, 1, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.2)
        x, logits = self.attention(x)
        return self.last(x), logits


class Pair(nn.Module):
    """Modules of one phase under one name, so that they are wrapped, and leave, together. ``forward(name, *inputs)`` runs one or several of them."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.of = nn.ModuleDict(modules)

    def forward(self, *calls: tuple[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [self.of[name](x) for name, x in calls]


def _real(out: tuple[Tensor, Tensor], wanted: float) -> Tensor:
    return sum(F.mse_loss(each, torch.full_like(each, wanted)) for each in out)  # type: ignore[return-value]


def ugatit(full: bool, wrap: Wrap) -> Task:
    """Discriminators first, then generators, which also translate back (cycle) and leave what is in their own domain as it is (identity)."""
    pixels, width = (256, 64) if full else (64, 4)
    generators = Pair(ab=Generator(width, pixels), ba=Generator(width, pixels))
    sides = {"global": 7, "local": 5} if full else {"global": 5, "local": 4}
    judges = Pair(**{f"{size}_{side}": Discriminator(width, layers) for side in "ab" for size, layers in sides.items()})
    translate, judge = wrap(generators), wrap(judges)

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        a, b = torch.rand(2, 1, 3, pixels, pixels, generator=draw) * 2 - 1
        return a, b

    def judging(draw: torch.Generator) -> Tensor:
        a, b = batch(draw)
        with torch.no_grad():
            (to_b, _), (to_a, _) = generators(("ab", a), ("ba", b))
        seen = [(f"{size}_{side}", x) for side, real, fake in (("a", a, to_a), ("b", b, to_b)) for size in sides for x in (real, fake)]
        return sum(_real(out, float(at % 2 == 0)) for at, out in enumerate(judge(*seen)))  # type: ignore[return-value]

    def translating(draw: torch.Generator) -> Tensor:
        a, b = batch(draw)
        # One call of the wrapped module, for all of its outputs: it hears of each backward once.
        (to_b, from_a), (to_a, from_b), (same_b, not_a), (same_a, not_b) = translate(("ab", a), ("ba", b), ("ab", b), ("ba", a))
        (back_a, _), (back_b, _) = generators(("ba", to_b), ("ab", to_a))
        for parameter in judges.parameters():
            parameter.requires_grad_(False)
        judged = judges(*((f"{size}_{side}", x) for side, x in (("a", to_a), ("b", to_b)) for size in sides))
        for parameter in judges.parameters():
            parameter.requires_grad_(True)
        fooled = sum(_real(out, 1.0) for out in judged)
        kept = F.l1_loss(back_a, a) + F.l1_loss(back_b, b) + F.l1_loss(same_a, a) + F.l1_loss(same_b, b)
        told = sum(F.binary_cross_entropy_with_logits(x, torch.ones_like(x)) for x in (from_a, from_b))
        told += sum(F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)) for x in (not_a, not_b))
        return fooled + 10 * kept + 1000 * told

    return Task([generators, judges], [(judging, list(judges.parameters())), (translating, list(generators.parameters()))])


TASKS: Final[dict[str, Callable[[bool, Wrap], Task]]] = {
    "vgg16": lambda full, wrap: images(vgg, full, wrap),
    "resnet101": lambda full, wrap: images(resnet101, full, wrap),
    "ugatit": ugatit,
    "bert-base": bert_base,
    "gpt2": gpt2,
    "lstm": lstm,
}
