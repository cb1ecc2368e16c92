"""A compressor as scripts for BytePS and Horovod write it: signs and a mean magnitude, kept beside the signs as the context. And one that keeps a share."""

import byteps.torch as bps
import torch
from byteps.torch.compression import Compressor, FP16Compressor


class SignCompressor(Compressor):
    @staticmethod
    def compress(tensor):
        return tensor.sign().to(torch.int8), (tensor.abs().mean(), tensor.dtype)

    @staticmethod
    def decompress(tensor, ctx):
        scale, dtype = ctx
        return tensor.to(dtype) * scale


class RoundedCompressor(FP16Compressor):
    @staticmethod
    def compress(tensor):
        small, ctx = FP16Compressor.compress(tensor.round())
        return small, ctx


bps.init()
rank = bps.rank()
values = torch.full((5000,), 0.75 + rank)
mean = bps.push_pull(values, name="rounded", compression=RoundedCompressor)
assert torch.equal(mean, torch.full((5000,), 1.5)), mean
signs = bps.push_pull(torch.tensor([3.0, -1.0]) * (1 - 2 * rank), average=False, name="signs", compression=SignCompressor)
assert torch.equal(signs, torch.zeros(2)), signs

torch.manual_seed(0)
model = torch.nn.Linear(300, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=SignCompressor)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(rank)
before = float(model.weight.double().sum())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(8, 300)).square().mean().backward()
    optimizer.step()
after = float(model.weight.double().sum())
assert before != after
print(f"rank {rank} sum {after:.9f}", flush=True)
