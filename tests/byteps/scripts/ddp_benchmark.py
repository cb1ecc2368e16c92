"""A model under DistributedDataParallel, with batch norm and accumulation, in the shape of BytePS's DDP examples."""

import byteps.torch as bps
import torch
import torch.nn.functional as F  # noqa: N812
from byteps.torch.parallel import DistributedDataParallel as DDP  # noqa: N817

bps.init()
torch.manual_seed(10 + bps.rank())
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5)
)
model = DDP(model, device_ids=[bps.local_rank()] if torch.cuda.is_available() else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _step in range(3):
    optimizer.zero_grad()
    with model.no_sync():
        F.cross_entropy(model(torch.rand(2, 3, 8, 8)), torch.randint(0, 5, (2,))).backward()
    F.cross_entropy(model(torch.rand(2, 3, 8, 8)), torch.randint(0, 5, (2,))).backward()
    optimizer.step()
total = float(sum(p.double().sum() for p in model.parameters()))
print(f"rank {bps.rank()} trained {total:.12f}", flush=True)
