"""A worker over ps-lite: sums of constants over steps without a pause, every dtype, a broadcast, and a model's gradients. Prints one line of JSON.

argv: steps, a codec for the model's gradients, and "barrier" where workers and servers of byteps's are in the job: such servers mix up the steps of such
workers that do not wait for each other. With the codec "sums" only the constants are summed, as tests/jobs/pslite_stock.py does, so that the two can share
a job.
"""

import json
import sys

import torch

import psgc.torch as psgc

steps, codec, apart = int(sys.argv[1]), sys.argv[2], "barrier" in sys.argv
psgc.init()
rank, size = psgc.rank(), psgc.size()
wrong = 0
for step in range(steps):
    mine = torch.full((25_000,), float(step + 1000 * rank))
    total = psgc.push_pull(mine, average=False, name="constant")
    wrong += int((total != sum(step + 1000 * other for other in range(size))).any())
    if apart:
        psgc.barrier()
if codec == "sums":
    print(json.dumps({"rank": rank, "wrong": wrong}))
    sys.exit()
dtypes = {}
for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
    total = psgc.push_pull(torch.arange(5, dtype=dtype) + rank, average=False, name=f"of {dtype}")
    dtypes[str(dtype)] = bool((total == size * torch.arange(5) + sum(range(size))).all())
large = psgc.push_pull(torch.arange(2_500_000, dtype=torch.float32) * (rank + 1), name="three parts")
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
psgc.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=codec)
losses = []
for step in range(10):
    torch.manual_seed(1000 * step + rank)
    x = torch.randn(64, 300)
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if apart:
        psgc.barrier()
    losses.append(loss.item())
checksum = sum(p.double().sum().item() for p in model.parameters())
psgc.barrier()
print(json.dumps({"rank": rank, "wrong": wrong, "dtypes": dtypes, "large": bool((large == torch.arange(2_500_000) * ((size + 1) / 2)).all()),
                  "losses": losses, "checksum": checksum}))  # fmt: skip
psgc.shutdown()
