"""Images a second on synthetic data, in the shape of BytePS's PyTorch benchmark; written for `byteps.torch` alone."""

import argparse
import timeit

import byteps.torch as bps
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-pushpull", action="store_true")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-warmup-batches", type=int, default=1)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--no-cuda", action="store_true")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

bps.init()
if args.cuda:
    torch.cuda.set_device(bps.local_rank())
torch.manual_seed(bps.rank())

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10))
if args.cuda:
    model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)

datasets = [(torch.rand(args.batch_size, 3, 16, 16), torch.LongTensor(args.batch_size).random_() % 10) for _ in range(4)]
data_index = 0


def benchmark_step():
    global data_index  # noqa: PLW0603
    data, target = datasets[data_index % len(datasets)]
    data_index += 1
    if args.cuda:
        data, target = data.cuda(), target.cuda()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(text):
    if bps.local_rank() == 0:
        print(text, flush=True)


device = "GPU" if args.cuda else "CPU"
log(f"Number of {device}s: {bps.size()}")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
img_secs = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    img_secs.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"Img/sec per {device}: {np.mean(img_secs):.1f} +-{1.96 * np.std(img_secs):.1f}")
log(f"Total img/sec on {bps.size()} {device}(s): {bps.size() * np.mean(img_secs):.1f}")
print(f"rank {bps.rank()} steps {data_index} sum {float(sum(p.double().sum() for p in model.parameters())):.12f}", flush=True)
