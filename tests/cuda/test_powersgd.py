"""`powersgd` on the GPU: what ranks must agree on has the CPU's bits; the products with the gradient are cuBLAS's, equal from run to run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.backends import cuda_state
from psgc.codecs.codec import Stream
from psgc.codecs.common.orthonormal import orthonormalise
from tests.cuda.against_cpu import assert_same, payload_tensor, status, tensor, values

STREAM = Stream(seed=3, step=1, rank=1, bucket=2)
SHAPES = ((40, 30), (7,), (12, 9, 5), (50, 40))
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)


def pair(device: torch.device, rank: int = 2) -> tuple[Any, Any]:
    scheme = parse_scheme(f"powersgd:rank={rank}", BucketContext("float32", shapes=SHAPES))
    return scheme.new_state(NUMEL), cuda_state(scheme, NUMEL, device)


def bits(x: torch.Tensor) -> Any:
    return x.cpu().numpy().view(np.uint32)


def test_steps_of_two_ranks_give_the_bits_of_the_cpu_from_the_same_payloads(device: torch.device) -> None:
    """The CPU's state and the GPU's are fed the same payloads for three steps, so that differences of the matrix products do not add up."""
    here, there = pair(device)
    residual = np.zeros(NUMEL, np.float32)
    kept = tensor(residual, device)
    for step in range(1, 4):
        grad, sent = values(NUMEL, step), []
        for index, round_ in enumerate(here.rounds):
            stream = Stream(seed=3, step=step, rank=1, bucket=2)
            payload = np.zeros(4 * round_.numel, np.uint8)
            assert not here.encode(index, grad, residual, 0.5, stream, payload).nonfinite
            again = []
            for _ in range(2):
                out, state = payload_tensor(np.full_like(payload, 0xA5), device), status(device)
                there.encode(index, tensor(grad, device), kept, 0.5, stream, out, state)
                assert state.tolist() == [0, payload.size]
                again.append(out.cpu().numpy())
            assert again[0].tobytes() == again[1].tobytes()
            wanted, got = payload.view(np.float32), again[0].view(np.float32)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(np.abs(wanted).max()))
            sent.append(payload)
            if index == 0:
                here.take(0, payload)
                there.take(0, payload_tensor(payload, device))
        target, result = grad.copy(), tensor(grad, device)
        here.apply(sent[1], sent, target, residual, 0.5)
        there.apply([payload_tensor(sent[1], device)], [payload_tensor(one, device) for one in sent], result, kept, 0.5)
        assert_same(bits(result), target.view(np.uint32), "result")
        assert_same(bits(kept), residual.view(np.uint32), "residual")
    here.add_back(sent, residual)
    there.add_back([payload_tensor(one, device) for one in sent], kept)
    assert_same(bits(kept), residual.view(np.uint32), "residual with what was sent")
    for first, factor in here.factors.items():
        assert_same(bits(there.factors[first]), factor.view(np.uint32), "Q")


def test_columns_become_orthonormal_to_the_bits_of_the_cpu(device: torch.device) -> None:
    from psgc.codecs.common.sums import LEAF
    from psgc.cuda.common.launching import launch
    from psgc.cuda.lowrank.kernels import orthonormal_kernel

    tall = values(5000 * 3, 1).reshape(5000, 3)
    dependent = np.repeat(values(60, 2).reshape(60, 1), 3, axis=1)
    tiny = (values(60 * 3, 3) * np.float32(1e-38)).reshape(60, 3)
    for p in (tall, dependent, np.ascontiguousarray(dependent * np.float32(-2.5)), tiny, np.zeros((9, 3), np.float32)):
        there = tensor(p.reshape(-1), device)
        leaves, coefficients = (torch.zeros(count, dtype=torch.float64, device=device) for count in (2, 3))
        table = torch.tensor([0, len(p)], device=device)
        launch(orthonormal_kernel, 1, there, table, leaves, coefficients, 3, 2, LEAF=LEAF, STEPS=8, PASSES=2, num_warps=8)
        here = p.copy()
        orthonormalise(here)
        assert_same(bits(there), here.reshape(-1).view(np.uint32), f"{p.shape}")


def test_what_is_not_finite_is_flagged_and_sent_as_zeros(device: torch.device) -> None:
    _, there = pair(device)
    grad = values(NUMEL, 1)
    grad[-1] = np.float32("inf")
    out, state = torch.ones(4 * there.rounds[0].numel, dtype=torch.uint8, device=device), status(device)
    there.encode(0, tensor(grad, device), None, 1.0, STREAM, out, state)
    assert state.tolist() == [1, out.numel()]
    assert not out.any()


def test_restored_factors_are_those_that_were_saved(device: torch.device) -> None:
    _, there = pair(device)
    saved = {first: torch.randn_like(factor) for first, factor in there.factors.items()}
    there.restore_factors(saved)
    assert all(torch.equal(there.factors[first], factor) for first, factor in saved.items())
    there.restore_factors({})
    assert not any(factor.any() for factor in there.factors.values())
