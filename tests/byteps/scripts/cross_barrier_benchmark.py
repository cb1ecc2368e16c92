"""The benchmark without a barrier at each step, in the shape of BytePS's: another import, and CrossBarrier in place of the wrapped optimizer."""

import argparse
import timeit

import byteps.torch.cross_barrier as bps
import torch
import torch.nn.functional as F  # noqa: N812

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--adam", action="store_true")
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

bps.init()
torch.manual_seed(bps.rank())
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 256, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if args.adam else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
compression = bps.Compression.fp16 if args.fp16_allreduce else bps.Compression.none
optimizer = bps.CrossBarrier(
    model,
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    num_steps=args.num_warmup_batches + args.num_iters * args.num_batches_per_iter,
)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
datasets = [(torch.rand(4, 3, 16, 16), torch.randint(0, 10, (4,))) for _ in range(3)]
data_index = 0


def benchmark_step():
    global data_index  # noqa: PLW0603
    data, target = datasets[data_index % len(datasets)]
    data_index += 1
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
for index in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    if bps.rank() == 0:
        print(f"Iter #{index}: {4 * args.num_batches_per_iter / seconds:.1f} img/sec", flush=True)
total = float(sum(value.double().sum() for value in model.state_dict().values()))
print(f"rank {bps.rank()} steps {data_index} sum {total:.12f}", flush=True)
