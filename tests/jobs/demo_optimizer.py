"""A worker that trains by DeMo, and beside it by the published algorithm by hand, with all ranks' gradients. Run by tests.

Prints for each run its name, a digest of the parameters, how far they are from the loop's, and the first and the last loss.
"""

from __future__ import annotations

import hashlib

import numpy as np
import scipy.fft
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.errors import UsageError

STEPS, LR, DECAY, K = 12, 2e-3, 0.9, 24


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 70), nn.Tanh(), nn.Linear(70, 5))


def loss_of(model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    x = torch.randn(16, 100, generator=draw)
    return nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))


def sent_of(m: np.ndarray) -> np.ndarray:
    """What DeMo sends of a momentum: of each 64 x 64 elements, the k largest coefficients, in float64."""
    rows, columns = m.shape if m.ndim == 2 else (-(-m.size // 64), 64)
    matrix = np.zeros((-(-rows // 64) * 64, -(-columns // 64) * 64))
    flat = np.zeros(rows * columns)
    flat[: m.size] = m.ravel()
    matrix[:rows, :columns] = flat.reshape(rows, columns)
    out = np.zeros_like(matrix)
    for top in range(0, matrix.shape[0], 64):
        for left in range(0, matrix.shape[1], 64):
            square = scipy.fft.dctn(matrix[top : top + 64, left : left + 64], norm="ortho")
            chosen = np.argsort(-np.abs(square).ravel())[:K]
            kept = np.zeros(4096)
            kept[chosen] = square.ravel()[chosen]
            out[top : top + 64, left : left + 64] = scipy.fft.idctn(kept.reshape(64, 64), norm="ortho")
    return out


def padded(values: np.ndarray) -> np.ndarray:
    rows, columns = values.shape if values.ndim == 2 else (-(-values.size // 64), 64)
    matrix = np.zeros((-(-rows // 64) * 64, -(-columns // 64) * 64))
    flat = np.zeros(rows * columns)
    flat[: values.size] = values.ravel()
    matrix[:rows, :columns] = flat.reshape(rows, columns)
    return matrix


def by_hand() -> list[torch.Tensor]:
    model = model_of()
    draws = [torch.Generator().manual_seed(rank) for rank in range(psgc.size())]
    parameters = list(model.parameters())
    momenta = [[padded(np.zeros(tuple(p.shape))) for p in parameters] for _ in draws]
    for _ in range(STEPS):
        totals = [np.zeros_like(m) for m in momenta[0]]
        for rank, draw in enumerate(draws):
            model.zero_grad()
            loss_of(model, draw).backward()
            for place, parameter in enumerate(parameters):
                momenta[rank][place] = DECAY * momenta[rank][place] + padded(parameter.grad.double().numpy())
                sent = sent_of(momenta[rank][place])
                momenta[rank][place] -= sent
                totals[place] += sent
        with torch.no_grad():
            for parameter, total in zip(parameters, totals, strict=True):
                columns = parameter.shape[1] if parameter.dim() == 2 else 64
                rows = parameter.shape[0] if parameter.dim() == 2 else -(-parameter.numel() // 64)
                step = torch.from_numpy(np.sign(total[:rows, :columns]).ravel()[: parameter.numel()].reshape(tuple(parameter.shape)))
                parameter.sub_(LR * step.float())
    return [parameter.detach() for parameter in parameters]


def by_demo(resumed: bool = False) -> tuple[list[torch.Tensor], list[float]]:
    model, draw, losses = model_of(), torch.Generator().manual_seed(psgc.rank()), []
    optimizer = psgc.DeMo(model.named_parameters(), lr=LR, decay=DECAY, k=K)
    for step in range(STEPS):
        if resumed and step == STEPS // 2:
            state = optimizer.state_dict()
            optimizer = psgc.DeMo(model.named_parameters(), lr=LR, decay=DECAY, k=K)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss = loss_of(model, draw)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach() for parameter in model.parameters()], losses


def refused() -> None:
    """What averages the same gradients is wrapped around the model before the optimizer is made, and after."""
    model = model_of()
    kept = [psgc.DistributedDataParallel(model)]
    try:
        psgc.DeMo(model.named_parameters())
    except UsageError as error:
        print(f"refused: {error}", flush=True)
    model = model_of()
    optimizer = psgc.DeMo(model.named_parameters())
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    kept.append(DistributedDataParallel(model))
    try:
        optimizer.step()
    except UsageError as error:
        print(f"refused: {error}", flush=True)
    del kept
    dist.destroy_process_group()


def main() -> None:
    psgc.init()
    wanted = by_hand()
    for name, resumed in (("whole", False), ("resumed", True)):
        parameters, losses = by_demo(resumed)
        digest = hashlib.sha256(b"".join(parameter.numpy().tobytes() for parameter in parameters)).hexdigest()[:12]
        # A sign differs where rounding decides it; the share of those that do.
        off = sum(int(((own - its).abs() > LR / 2).sum()) for own, its in zip(parameters, wanted, strict=True))
        share = off / sum(parameter.numel() for parameter in parameters)
        print(f"{name} {digest} {share:.4f} {losses[0]:.3f} {losses[-1]:.3f}", flush=True)
    model = model_of()
    optimizer = psgc.DeMo(model.named_parameters(), lr=LR, decay=DECAY, k=K)
    loss_of(model, torch.Generator().manual_seed(psgc.rank())).backward()
    last = list(model.parameters())[-1]
    if psgc.rank() == 1:
        last.grad.view(-1)[0] = float("inf")
    optimizer.step()
    print(f"infinity {bool(last.isnan().all())}", flush=True)
    refused()
    psgc.shutdown()


main()
