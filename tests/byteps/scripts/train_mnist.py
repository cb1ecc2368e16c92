"""Training with a sampler, test metrics averaged over ranks, in the shape of BytePS's MNIST example; digits are drawn here."""

import argparse

import byteps.torch as bps
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-pushpull", action="store_true")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

bps.init()
torch.manual_seed(args.seed)
if args.cuda:
    torch.cuda.set_device(bps.local_rank())


def drawn(count, seed):
    """Images of 8 x 8 with a bar whose place is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=generator)
    images = 0.3 * torch.rand(count, 1, 8, 8, generator=generator)
    images[torch.arange(count), 0, :, labels] += 1
    return torch.utils.data.TensorDataset(images, labels)


train, test = drawn(512, 0), drawn(128, 1)
train_sampler = DistributedSampler(train, num_replicas=bps.size(), rank=bps.rank())
test_sampler = DistributedSampler(test, num_replicas=bps.size(), rank=bps.rank())
train_loader = torch.utils.data.DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
test_loader = torch.utils.data.DataLoader(test, batch_size=args.batch_size, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 36, 8)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


model = Net()
if args.cuda:
    model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * bps.size(), momentum=args.momentum)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


def train_epoch(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def metric_average(value, name):
    return bps.push_pull(torch.tensor(value), name=name).item()


def evaluate():
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).float().sum().item()
    return metric_average(loss / len(test_sampler), "avg_loss"), metric_average(right / len(test_sampler), "avg_accuracy")


for epoch in range(1, args.epochs + 1):
    train_epoch(epoch)
    test_loss, accuracy = evaluate()
    if bps.rank() == 0:
        print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
