"""push_pull of single tensors, all together and one by one, in the shape of BytePS's microbenchmark."""

import byteps.torch as bps
import torch
from byteps.common import BytePSBasics
from byteps.misc import imagenet18
from byteps.torch.compression import Compression
from byteps.torch.ops import poll, push_pull_async, synchronize

bps.init(lazy=False)
basics = BytePSBasics(__file__, "c_lib")
assert (basics.rank(), basics.size(), basics.local_rank(), basics.local_size()) == (
    bps.rank(),
    bps.size(),
    bps.local_rank(),
    bps.local_size(),
)
for name in ("first", "second"):
    bps.declare(name)
total = bps.size() * (bps.size() + 1) / 2
handles = [push_pull_async(torch.full((1000,), bps.rank() + 1.0), average=False, name=name) for name in ("first", "second")]
for handle in handles:
    output = synchronize(handle)
    assert torch.equal(output, torch.full((1000,), total)), output
own = torch.full((3, 3), bps.rank() + 1.0)
handle = bps.byteps_push_pull(own, average=True, name="inplace")
while not poll(handle):
    pass
assert synchronize(handle) is own and torch.equal(own, torch.full((3, 3), total / bps.size()))
halved = bps.push_pull(torch.full((8,), bps.rank() + 1.0), average=False, name="halved", compression=Compression.fp16)
assert torch.equal(halved, torch.full((8,), total))
assert imagenet18.size() == bps.size()
bps.byteps_torch_set_num_grads(1)
handle, count = bps.byteps_push_pull_group(own, average=True, name="grouped")
synchronize(handle)
milliseconds, megabytes_a_second = bps.get_pushpull_speed()
print(f"rank {bps.rank()} of {bps.size()}: right", flush=True)
bps.shutdown()
