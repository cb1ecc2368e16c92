"""Well-known models by name: their tensors and the FLOPs of each. Everything is computed from the architectures; nothing is measured.

Owns shapes, names and multiply-adds. A weight tensor's forward cost is the cost of its layer, 2 FLOPs a multiply-add;
embeddings, biases and norms cost nothing, and attention's matrix products are left out. Backward costs twice as much.
Sources: Simonyan and Zisserman 2015 (VGG), He et al. 2016 (ResNet), Kim et al. 2020 (U-GAT-IT), Devlin et al. 2019 (BERT, with a
question-answering head), Radford et al. 2019 (GPT-2), the PyTorch word-language-model LSTM with tied embeddings, Touvron et al. 2023 and
Dubey et al. 2024 (Llama shapes of 1B and 8B).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor. flops: of its layer's forward pass for one item (an image or a token)."""

    name: str
    shape: tuple[int, ...]
    flops: float = 0.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's tensors in forward order. item: what ``batch`` counts, e.g. images; batch: the default for one GPU."""

    name: str
    item: str
    batch: int
    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


def conv(name: str, into: int, out: int, kernel: int, pixels: int, *, bias: bool = False) -> list[Weight]:
    """A square convolution whose output has ``pixels`` a side."""
    weight = Weight(f"{name}.weight", (out, into, kernel, kernel), 2.0 * out * into * kernel**2 * pixels**2)
    return [weight, *([Weight(f"{name}.bias", (out,))] if bias else [])]


def linear(name: str, into: int, out: int, *, bias: bool = True, times: int = 1) -> list[Weight]:
    """A linear layer applied ``times`` times an item."""
    return [Weight(f"{name}.weight", (out, into), 2.0 * into * out * times), *([Weight(f"{name}.bias", (out,))] if bias else [])]


def norm(name: str, width: int, *parts: str) -> list[Weight]:
    return [Weight(f"{name}.{part}", (width,)) for part in parts or ("weight", "bias")]


def vgg16() -> list[Weight]:
    weights, into, pixels, place = [], 3, 224, 0
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            weights += conv(f"features.{place}", into, width, 3, pixels, bias=True)
            into, place = width, place + 2
        pixels, place = pixels // 2, place + 1
    for index, (wide, narrow) in zip((0, 3, 6), ((512 * 49, 4096), (4096, 4096), (4096, 1000)), strict=True):
        weights += linear(f"classifier.{index}", wide, narrow)
    return weights


def resnet(*blocks: int) -> list[Weight]:
    weights = [*conv("conv1", 3, 64, 7, 112), *norm("bn1", 64)]
    into = 64
    for stage, repeats in enumerate(blocks):
        width, pixels = 64 << stage, 56 >> stage
        for block in range(repeats):
            name = f"layer{stage + 1}.{block}"
            before = pixels * (2 if stage and not block else 1)  # the 3x3 convolution halves the resolution
            weights += [*conv(f"{name}.conv1", into, width, 1, before), *norm(f"{name}.bn1", width)]
            weights += [*conv(f"{name}.conv2", width, width, 3, pixels), *norm(f"{name}.bn2", width)]
            weights += [*conv(f"{name}.conv3", width, 4 * width, 1, pixels), *norm(f"{name}.bn3", 4 * width)]
            if not block:
                weights += [*conv(f"{name}.downsample.0", into, 4 * width, 1, pixels), *norm(f"{name}.downsample.1", 4 * width)]
            into = 4 * width
    return [*weights, *linear("fc", 2048, 1000)]


def _generator(name: str) -> list[Weight]:
    weights = conv(f"{name}.DownBlock.1", 3, 64, 7, 256)
    weights += conv(f"{name}.DownBlock.5", 64, 128, 3, 128) + conv(f"{name}.DownBlock.9", 128, 256, 3, 64)
    for block in range(4):
        weights += conv(f"{name}.res{block}.1", 256, 256, 3, 64) + conv(f"{name}.res{block}.5", 256, 256, 3, 64)
    weights += linear(f"{name}.gap_fc", 256, 1, bias=False) + linear(f"{name}.gmp_fc", 256, 1, bias=False)
    weights += conv(f"{name}.conv1x1", 512, 256, 1, 64, bias=True)
    weights += linear(f"{name}.FC.0", 64 * 64 * 256, 256, bias=False) + linear(f"{name}.FC.2", 256, 256, bias=False)
    weights += linear(f"{name}.gamma", 256, 256, bias=False) + linear(f"{name}.beta", 256, 256, bias=False)
    for block in range(4):
        for half in (1, 2):
            weights += conv(f"{name}.UpBlock1_{block}.conv{half}", 256, 256, 3, 64) + norm(
                f"{name}.UpBlock1_{block}.norm{half}", 256, "rho"
            )
    weights += conv(f"{name}.UpBlock2.2", 256, 128, 3, 128) + norm(f"{name}.UpBlock2.3", 128, "rho", "gamma", "beta")
    weights += conv(f"{name}.UpBlock2.7", 128, 64, 3, 256) + norm(f"{name}.UpBlock2.8", 64, "rho", "gamma", "beta")
    return weights + conv(f"{name}.UpBlock2.11", 64, 3, 7, 256)


def _discriminator(name: str, layers: int) -> list[Weight]:
    weights, width, pixels = conv(f"{name}.model.0", 3, 64, 4, 128, bias=True), 64, 128
    for layer in range(1, layers - 2):
        pixels //= 2
        weights += conv(f"{name}.model.{layer}", width, 2 * width, 4, pixels, bias=True)
        width *= 2
    weights += conv(f"{name}.model.{layers - 2}", width, 2 * width, 4, pixels - 1, bias=True)
    width *= 2
    weights += linear(f"{name}.gap_fc", width, 1, bias=False) + linear(f"{name}.gmp_fc", width, 1, bias=False)
    weights += conv(f"{name}.conv1x1", 2 * width, width, 1, pixels - 1, bias=True)
    return weights + conv(f"{name}.conv", width, 1, 4, pixels - 2)


def ugatit() -> list[Weight]:
    weights = _generator("genA2B") + _generator("genB2A")
    for side in "AB":
        weights += _discriminator(f"disG{side}", 7) + _discriminator(f"disL{side}", 5)
    return weights


def bert_base() -> list[Weight]:
    weights = [Weight(f"embeddings.{what}.weight", (rows, 768)) for what, rows in (("word", 30522), ("position", 512), ("type", 2))]
    weights += norm("embeddings.LayerNorm", 768)
    for layer in range(12):
        name = f"layer.{layer}"
        for what in ("query", "key", "value", "attention.output"):
            weights += linear(f"{name}.{what}", 768, 768)
        weights += norm(f"{name}.attention.LayerNorm", 768)
        weights += linear(f"{name}.intermediate", 768, 3072) + linear(f"{name}.output", 3072, 768) + norm(f"{name}.LayerNorm", 768)
    return weights + linear("qa_outputs", 768, 2)


def gpt2() -> list[Weight]:
    # the output layer shares the token embedding's weight, so that tensor has the output layer's cost
    weights = [Weight("wte.weight", (50257, 768), 2.0 * 50257 * 768), Weight("wpe.weight", (1024, 768))]
    for layer in range(12):
        name = f"h.{layer}"
        weights += norm(f"{name}.ln_1", 768) + linear(f"{name}.attn.c_attn", 768, 2304) + linear(f"{name}.attn.c_proj", 768, 768)
        weights += norm(f"{name}.ln_2", 768) + linear(f"{name}.mlp.c_fc", 768, 3072) + linear(f"{name}.mlp.c_proj", 3072, 768)
    return weights + norm("ln_f", 768)


def lstm() -> list[Weight]:
    weights = []
    for layer in range(2):
        for side in ("ih", "hh"):
            weights += [Weight(f"rnns.{layer}.weight_{side}_l0", (6000, 1500), 2.0 * 6000 * 1500)]
            weights += [Weight(f"rnns.{layer}.bias_{side}_l0", (6000,))]
    return weights + linear("decoder", 1500, 33278)


def llama(layers: int, width: int, inner: int, key_width: int, vocabulary: int, *, tied: bool) -> list[Weight]:
    cost = 2.0 * vocabulary * width
    weights = [Weight("embed_tokens.weight", (vocabulary, width), cost if tied else 0.0)]
    for layer in range(layers):
        name = f"layers.{layer}"
        weights += norm(f"{name}.input_layernorm", width, "weight")
        for what, into, out in (
            ("q_proj", width, width), ("k_proj", width, key_width), ("v_proj", width, key_width), ("o_proj", width, width),
            ("gate_proj", width, inner), ("up_proj", width, inner), ("down_proj", inner, width),
        ):  # fmt: skip
            weights += linear(f"{name}.{what}", into, out, bias=False)
        weights += norm(f"{name}.post_attention_layernorm", width, "weight")
    weights += norm("norm", width, "weight")
    return weights if tied else [*weights, Weight("lm_head.weight", (vocabulary, width), cost)]


_MODELS: Final[dict[str, tuple[str, int, Callable[[], list[Weight]]]]] = {
    "vgg16": ("image", 32, vgg16),
    "resnet50": ("image", 64, lambda: resnet(3, 4, 6, 3)),
    "resnet101": ("image", 32, lambda: resnet(3, 4, 23, 3)),
    "ugatit": ("image", 2, ugatit),
    "bert-base": ("token", 1024, bert_base),
    "gpt2": ("token", 1024, gpt2),
    "lstm": ("token", 1600, lstm),
    "llama-1b": ("token", 8192, lambda: llama(16, 2048, 8192, 512, 128256, tied=True)),
    "llama-8b": ("token", 8192, lambda: llama(32, 4096, 14336, 1024, 128256, tied=False)),
}


def architecture_names() -> tuple[str, ...]:
    return tuple(_MODELS)


def architecture(name: str) -> Architecture:
    """The model of that name. Raises UsageError that lists the known names."""
    found = _MODELS.get(name.lower().replace("_", "-"))
    if found is None:
        raise UsageError(f"unknown model {name!r}; choose one of {', '.join(_MODELS)}")
    item, batch, weights = found
    return Architecture(name.lower().replace("_", "-"), item, batch, tuple(weights()))
