"""Images a second before and after suspend and resume, in the shape of BytePS's elastic example. Who starts the new scheduler, servers and workers
makes the file --barrier, as the example's comment asks for a barrier there."""

import argparse
import os
import time
import timeit

import byteps.torch as bps
import torch
import torch.nn.functional as F  # noqa: N812

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--barrier", default="barrier")
parser.add_argument("--resume-workers", type=int, default=1)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--stop", action="store_true")
parser.add_argument("--no-cuda", action="store_true")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

bps.init()
if args.cuda:
    torch.cuda.set_device(bps.local_rank())
rank = bps.rank()
torch.manual_seed(rank)

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10))
if args.cuda:
    model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)

datasets = [(torch.rand(args.batch_size, 3, 8, 8), torch.LongTensor(args.batch_size).random_() % 10) for _ in range(3)]
data_index = 0


def benchmark_step():
    global data_index  # noqa: PLW0603
    data, target = datasets[data_index % len(datasets)]
    data_index += 1
    if args.cuda:
        data, target = data.cuda(), target.cuda()
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if bps.local_rank() == 0:
        print(text, flush=True)


def benchmark():
    for x in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        log(f"Iter #{x}: {args.batch_size * args.num_batches_per_iter / seconds:.1f} img/sec")
    total = float(sum(p.double().sum() for p in model.parameters()))
    print(f"rank {bps.rank()} of {bps.size()}: steps {data_index} sum {total:.12f}", flush=True)


benchmark()
log("elastic training...")
bps.suspend()
print(f"suspended: rank {bps.rank()} of {bps.size()}, {bps.local_rank()} of {bps.local_size()} here", flush=True)
log("bps is suspended.")

# barrier: shutdown and start other workers altogether
while not os.path.exists(args.barrier):
    time.sleep(0.02)
if args.fail:
    raise RuntimeError("no more images")
if rank < args.resume_workers:
    bps.resume(args.resume_workers, 1, rank)
    log("bps is resumed.")
    if not args.stop:
        benchmark()
