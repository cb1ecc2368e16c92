"""ResNet-50 with checkpoints, warm-up and accumulation, in the shape of BytePS's ImageNet example; channels, images and data are small and synthetic."""

import argparse
import os

import byteps.torch as bps
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-pushpull", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--batches", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--wd", type=float, default=0.00005)
args = parser.parse_args()
allreduce_batch_size = args.batch_size * args.batches_per_pushpull

bps.init()
torch.manual_seed(42)
torch.set_num_threads(1)

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
# Every rank starts from the epoch that rank 0 has found a checkpoint of.
resume_from_epoch = bps.push_pull(torch.tensor(resume_from_epoch), name="resume_from_epoch").item()
resume_from_epoch = int(bps.broadcast_object(resume_from_epoch, root_rank=0, name="resume_from_epoch"))


class Bottleneck(nn.Module):
    def __init__(self, inner, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        fits = inner == 4 * width and stride == 1
        self.shortcut = (
            nn.Identity() if fits else nn.Sequential(nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(width=2, classes=10):
    blocks, inner = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            blocks.append(Bottleneck(inner, width << stage, 2 if stage and not block else 1))
            inner = 4 * (width << stage)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


model = resnet50()
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * args.batches_per_pushpull * bps.size(), momentum=0.9, weight_decay=args.wd
)
optimizer = bps.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=bps.Compression.none,
    backward_passes_per_step=args.batches_per_pushpull,
)
if resume_from_epoch > 0 and bps.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += bps.push_pull(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch):
    progress = min(1.0, (epoch + batch / args.batches) / args.warmup_epochs)
    factor = 1 / bps.size() * (progress * (bps.size() - 1) + 1)
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * bps.size() * args.batches_per_pushpull * factor


def train(epoch):
    model.train()
    loss_metric = Metric("train_loss")
    generator = torch.Generator().manual_seed(100 * epoch + bps.rank())
    for batch in range(args.batches):
        adjust_learning_rate(epoch, batch)
        data = torch.rand(allreduce_batch_size, 3, 16, 16, generator=generator)
        target = torch.randint(0, 10, (allreduce_batch_size,), generator=generator)
        optimizer.zero_grad()
        for start in range(0, len(data), args.batch_size):
            loss = F.cross_entropy(model(data[start : start + args.batch_size]), target[start : start + args.batch_size])
            loss_metric.update(loss)
            (loss / args.batches_per_pushpull).backward()
        optimizer.step()
    if bps.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss_metric.avg:.4f}, {sum(1 for _ in model.parameters())} parameters", flush=True)


def save_checkpoint(epoch):
    if bps.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    save_checkpoint(epoch)
print(f"rank {bps.rank()} from epoch {resume_from_epoch}: {float(sum(p.double().sum() for p in model.parameters())):.10f}", flush=True)
