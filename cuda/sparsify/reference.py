"""The payloads of `topk`, `blocktopk` and `randomk` in plain torch on any device: the definition that the kernels beside it are held against."""

from __future__ import annotations

from typing import Final

import torch

from psgc.codecs.blocktopk import MOST_BLOCK, BlockTopKCodec
from psgc.codecs.codec import Codec, Stream
from psgc.codecs.common.streams import keys
from psgc.codecs.common.sums import LEAF
from psgc.codecs.randomk import RandomKCodec, shared_stream
from psgc.codecs.sparsify.gaps import GAPS
from psgc.codecs.sparsify.largest import MOST_OVER, PROBES, sample_size, sampled_rank
from psgc.codecs.topk import TopKCodec
from psgc.cuda.common.tensor_streams import hashed

_MAGNITUDE: Final = 0x7FFFFFFF
_LANES: Final = 8
_MAX_F32: Final = torch.finfo(torch.float32).max


def reference_encode(codec: Codec, p: torch.Tensor, stream: Stream) -> torch.Tensor:
    """The payload of p, uint8. p: float32, finite."""
    if isinstance(codec, RandomKCodec):
        return _randomk(codec, p, stream)
    if isinstance(codec, BlockTopKCodec):
        count, _ = codec.blocks(p.numel())
        chosen = _heaviest(p, codec.block, count)
        places = (chosen[:, None] * codec.block + torch.arange(codec.block, device=p.device)).flatten()
        return torch.cat([reference_packed(chosen), p[places[places < p.numel()]].view(torch.uint8)])
    assert isinstance(codec, TopKCodec)
    chosen = reference_chosen(codec.stage(stream.step, p.numel()) or codec, p)
    sparse = torch.cat([_bytes_of(chosen.numel(), p), p[chosen].view(torch.uint8), reference_packed(chosen)])
    dense = torch.cat([_bytes_of(-1, p), p.view(torch.uint8)])
    return sparse if sparse.numel() < dense.numel() else dense


def reference_chosen(codec: TopKCodec, p: torch.Tensor) -> torch.Tensor:
    """Places of the elements that are sent, ascending."""
    k, magnitudes = codec.count(p.numel()), (p.view(torch.int32) & _MAGNITUDE).long()
    largest = torch.argsort(-magnitudes, stable=True)[:k].sort().values
    if codec.select == "mstopk":
        return _probed(p, magnitudes, k)
    if codec.select == "sampled":
        least = magnitudes[_sample(p, k)].sort().values[-sampled_rank(p.numel(), k)].clamp(min=1)
        reached = torch.nonzero(magnitudes >= least).flatten()
        return largest if reached.numel() > MOST_OVER * k else reached
    return largest


def reference_packed(indices: torch.Tensor) -> torch.Tensor:
    """Ascending indices as bit-packed gaps: widths of the groups, then the groups."""
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    widths, packed = [], []
    for group in gaps.split(GAPS):
        width = int(group.max()).bit_length()
        bits = ((group[:, None] >> torch.arange(width, device=gaps.device)) & 1).flatten()
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).reshape(-1, 8)
        widths.append(width)
        packed.append((bits << torch.arange(8, device=gaps.device)).sum(1).to(torch.uint8))
    return torch.cat([torch.tensor(widths, dtype=torch.uint8, device=gaps.device), *packed])


def reference_places(numel: int, count: int, before: int, between: int, device: torch.device) -> torch.Tensor:
    """The element that `randomk` draws from each stratum."""
    words = hashed(torch.arange(count + 2, device=device), before, between)
    turn = (int(words[count]) << 32 | int(words[count + 1])) * numel >> 64
    strata, (size, wide) = torch.arange(count, device=device), divmod(numel, count)
    starts, sizes = strata * size + strata.clamp(max=wide), size + (strata < wide).long()
    return (starts + (words[:count] * sizes >> 32) + turn) % numel


def _randomk(codec: RandomKCodec, p: torch.Tensor, stream: Stream) -> torch.Tensor:
    (before, between), count = keys(shared_stream(stream)), codec.count(p.numel())
    places = reference_places(p.numel(), count, before, between, p.device)
    scale = p.numel() / count if codec.settings[0] else 1.0
    values = (p[places] * scale).clamp(-_MAX_F32, _MAX_F32)
    return torch.cat([_bytes_of(before, p), _bytes_of(between, p), values.view(torch.uint8)])


def _sample(p: torch.Tensor, k: int) -> torch.Tensor:
    numel, size = p.numel(), sample_size(p.numel(), k)
    j = torch.arange(size, device=p.device)
    return j if size == numel else (j * numel + ((j * 0x9E3779B1 & 0xFFFFFFFF) * numel >> 32)) // size


def _probed(p: torch.Tensor, magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """MSTop-K's bisection between the mean and the largest magnitude."""
    sums = p.abs().double()
    while sums.numel() > 1:
        sums = _halved(torch.nn.functional.pad(sums, (0, -sums.numel() % LEAF)).reshape(-1, LEAF))
    mean = (sums[0] / p.numel()).float()
    reach = p.abs().max() - mean
    low, high, below, above = torch.zeros_like(mean), torch.ones_like(mean), 0, 1 << 32
    for _ in range(PROBES):
        ratio = (low + high) / 2
        threshold = int((mean + ratio * reach).view(torch.int32)) & 0xFFFFFFFF
        if int((magnitudes >= threshold).sum()) > k:
            low, below = ratio, threshold
        else:
            high, above = ratio, threshold
    sent = torch.nonzero(magnitudes >= above).flatten()
    rest = torch.nonzero((magnitudes >= below) & (magnitudes < above)).flatten()
    return torch.cat([sent, rest[: k - sent.numel()]]).sort().values


def _heaviest(p: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """Numbers of the blocks whose squares sum to most, ascending; of equal ones the first."""
    squares = []
    for elements in p.split(block):
        runs = torch.zeros(1, MOST_BLOCK // LEAF, dtype=torch.float64, device=p.device)
        for number, run in enumerate(elements.split(LEAF)):
            lanes = torch.zeros(1, _LANES, dtype=torch.float64, device=p.device)
            for row in torch.nn.functional.pad(run.double(), (0, -run.numel() % _LANES)).reshape(-1, _LANES):
                lanes = lanes + row * row
            runs[0, number] = _halved(lanes)[0]
        squares.append(_halved(runs)[0])
    return torch.argsort(-torch.stack(squares), stable=True)[:count].sort().values


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """Each row's sum, its halves added until one element is left."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _bytes_of(number: int, p: torch.Tensor) -> torch.Tensor:
    """The number as u32, modulo 2**32."""
    signed = (number & 0xFFFFFFFF) - (1 << 32 if number & 0x80000000 else 0)
    return torch.tensor([signed], dtype=torch.int32, device=p.device).view(torch.uint8)
