"""push_pull of single tensors: sums, means, names, handles and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.buffers import TORCH_DTYPES
from psgc.torch.tensors.push_pull import UNNAMED_RING


@pytest.mark.parametrize("dtype", [d for d in TORCH_DTYPES.values() if d != torch.bool])
@pytest.mark.parametrize("average", [True, False])
def test_every_dtype_is_summed_or_averaged(ranks: Any, dtype: torch.dtype, average: bool) -> None:
    def work(rank: int) -> list[float]:
        tensor = torch.tensor([1, 2, 3], dtype=dtype) * (rank + 1)
        result = psgc.push_pull(tensor, average, "x")
        assert result.dtype == dtype and tensor.tolist() == [rank + 1, 2 * rank + 2, 3 * rank + 3]
        return result.tolist()

    mean = [1.5, 3.0, 4.5] if dtype.is_floating_point else [1, 3, 4]
    assert ranks.run(2, work) == [mean if average else [3, 6, 9]] * 2


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 3)])
def test_every_shape_comes_back_as_it_went(ranks: Any, shape: tuple[int, ...]) -> None:
    results = ranks.run(2, lambda rank: psgc.push_pull(torch.full(shape, rank * 2.0), name="x"))
    assert all(torch.equal(result, torch.full(shape, 1.0)) for result in results)


def test_strided_tensors_are_taken_in_logical_order(ranks: Any) -> None:
    def work(rank: int) -> bool:
        tensor = torch.arange(6.0).reshape(2, 3)
        tensor = tensor.t() if rank else tensor.t().contiguous()
        psgc.push_pull_inplace(tensor, average=False, name="x")
        return torch.equal(tensor, 2 * torch.arange(6.0).reshape(2, 3).t())

    assert ranks.run(2, work) == [True, True]


def test_names_meet_in_any_order(ranks: Any) -> None:
    def work(rank: int) -> dict[str, float]:
        names = ["a", "b", "c"] if rank else ["c", "a", "b"]
        handles = {name: psgc.push_pull_async(torch.tensor(float(ord(name) + rank)), False, name) for name in names}
        return {name: psgc.synchronize(handle).item() for name, handle in sorted(handles.items())}

    assert ranks.run(2, work) == [{"a": 195.0, "b": 197.0, "c": 199.0}] * 2


def test_unnamed_calls_meet_in_order_of_call_and_use_a_bounded_number_of_names(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        return [psgc.push_pull(torch.tensor([i * 1.0, rank]), average=False)[0].item() for i in range(3 * UNNAMED_RING)]

    assert ranks.run(2, work) == [[2.0 * i for i in range(3 * UNNAMED_RING)]] * 2
    assert len({s.layout for s in ranks.steps}) == UNNAMED_RING


def test_async_copies_its_input_and_inplace_writes_it(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        tensor = torch.full((2,), float(rank))
        handle = psgc.push_pull_async(tensor, name="x")
        tensor.fill_(100)
        other = torch.full((2,), float(rank))
        inplace = psgc.push_pull_async_inplace(other, name="y")
        assert psgc.synchronize(inplace) is other
        return [*psgc.synchronize(handle).tolist(), *other.tolist()]

    assert ranks.run(2, work) == [[0.5] * 4] * 2


def test_a_handle_is_polled_until_done_and_used_once(ranks: Any) -> None:
    def work(rank: int) -> None:
        handle = psgc.push_pull_async(torch.ones(2), name="x")
        psgc.barrier()
        assert psgc.poll(handle) is True
        psgc.synchronize(handle)
        assert psgc.synchronize(handle) is None, "as BytePS's"
        with pytest.raises(UsageError, match=f"handle {handle} is unknown"):
            psgc.poll(handle)

    ranks.run(2, work)


def test_the_gradient_of_a_mean_is_the_mean_of_the_gradient(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        tensor = torch.tensor([1.0, 2.0], requires_grad=True)
        (psgc.push_pull(tensor * 1, name="x") * (rank + 1)).sum().backward()
        return tensor.grad.tolist()

    assert ranks.run(2, work) == [[1.5, 1.5]] * 2


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradient_also_without_names(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        tensor = torch.tensor([1.0, 2.0], requires_grad=True)
        first, second = psgc.push_pull(tensor, average=False), psgc.push_pull(tensor * 2, average=False)
        (first * (rank + 1) + second * 10).sum().backward()
        return tensor.grad.tolist()

    assert ranks.run(2, work) == [[43.0, 43.0]] * 2


def test_writing_in_place_is_seen_by_autograd(ranks: Any) -> None:
    def work(rank: int) -> None:
        weight, tensor = torch.ones(2, requires_grad=True), torch.ones(2)
        product = weight * tensor
        psgc.push_pull_inplace(tensor, average=False, name="x")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    ranks.run(2, work)


@pytest.mark.usefixtures("alone")
class TestAlone:
    def test_the_sum_of_one_is_itself(self) -> None:
        tensor = torch.randn(5)
        assert torch.equal(psgc.push_pull(tensor, average=False, name="x"), tensor)
        assert torch.equal(psgc.push_pull(tensor, compression="int8"), tensor)

    @pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
    def test_a_name_keeps_its_shape_and_dtype(self, other: torch.Tensor) -> None:
        psgc.push_pull(torch.ones(2), name="x")
        with pytest.raises(UsageError, match=r"push_pull of 'x': was the mean of float32\[2\] .* is the mean of .*use another name"):
            psgc.push_pull(other, name="x")

    def test_what_has_no_dtype_of_psgcs_is_refused_by_name(self) -> None:
        with pytest.raises(UsageError, match="push_pull of 'x': psgc does not carry uint16"):
            psgc.push_pull(torch.ones(2, dtype=torch.uint16), name="x")

    @pytest.mark.parametrize("compression", ["int8", "onebit/relay", "shared", "powersgd"])
    def test_lossy_codecs_refuse_integers_by_the_tensors_name(self, compression: str) -> None:
        with pytest.raises(CodecError, match=r"push_pull of 'x': codec .* carries float32, .*, not int64; use 'none' for this tensor"):
            psgc.push_pull(torch.arange(3), name="x", compression=compression)
        with pytest.raises(CodecError, match=r"unnamed push_pull of shape \[3\]: codec .* not bool"):
            psgc.push_pull(torch.ones(3, dtype=torch.bool), compression=compression)

    @pytest.mark.parametrize("compression", [None, "int8", "topk", "shared", "powersgd", "onebit/relay"])
    def test_tensors_without_elements_come_back_at_once(self, compression: str | None) -> None:
        assert psgc.push_pull(torch.empty(0), name="x", compression=compression).shape == (0,)
        assert psgc.push_pull(torch.empty(2, 0, 3), compression=compression).shape == (2, 0, 3)

    @pytest.mark.parametrize("compression", ["powersgd:rank=0", "dithering:k=0", "topk:k=0", "onebut"])
    def test_a_codec_that_cannot_be_is_refused_by_the_tensors_name(self, compression: str) -> None:
        with pytest.raises(CodecError, match=r"push_pull of 'x': .*codec"):
            psgc.push_pull(torch.ones(3), name="x", compression=compression)

    @pytest.mark.parametrize("compression", [["int8"], 8])
    def test_compression_that_is_no_text_is_wrong_usage(self, compression: Any) -> None:
        with pytest.raises(UsageError, match="expected codec text such as 'int8', BytePS's options, a codec, a class"):
            psgc.push_pull(torch.ones(3), name="x", compression=compression)

    def test_what_is_wrong_is_found_before_the_tensor_is_copied(self) -> None:
        huge = torch.ones(1, 1).expand(1 << 16, 1 << 16)  # a copy would take 16 GB
        with pytest.raises(
            CodecError, match=r"tensor 'x': codec powersgd: a part of 4294967296 elements, at most 2147483647; .* another codec"
        ):
            psgc.push_pull(huge, name="x", compression="powersgd")
        with pytest.raises(CodecError, match="push_pull of 'x': unknown codec"):
            psgc.push_pull(huge, name="x", compression="powersdg")
        with pytest.raises(UsageError, match="push_pull of 'x': psgc carries dense tensors"):
            psgc.push_pull(torch.ones(3).to_sparse(), name="x")
        assert torch.equal(psgc.push_pull(torch.ones(2), name="x"), torch.ones(2)), "the name was not taken"

    def test_expanded_tensors_are_refused_in_place(self) -> None:
        with pytest.raises(UsageError, match=r"share memory; call contiguous\(\)"):
            psgc.push_pull_inplace(torch.ones(1).expand(3), name="x")

    def test_the_version_and_priority_of_byteps_are_accepted(self) -> None:
        assert psgc.declare("x") == 0
        assert psgc.synchronize(psgc.push_pull_async(torch.ones(1), True, "x", 3, -1)).item() == 1.0

    def test_handles_of_an_ended_session_are_unknown(self) -> None:
        handle = psgc.push_pull_async(torch.ones(1), name="x")
        psgc.shutdown()
        psgc.init()
        with pytest.raises(UsageError, match="unknown"):
            psgc.synchronize(handle)


def test_what_is_no_tensor_or_no_name_is_refused_before_the_job_hears_of_it(ranks: Any) -> None:
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    one: Any = torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "push_pull of 'loss': expected a tensor, got a float; torch.as_tensor": lambda: psgc.push_pull(cast("Any", 0.5), name="loss"),
        "push_pull: expected a tensor, got a list": lambda: psgc.push_pull_async(cast("Any", [1.0])),
        "push_pull of 'x': expected a tensor, got a ndarray": lambda: psgc.push_pull_inplace(cast("Any", np.ones(2)), name="x"),
        "push_pull of 5: the name is a int, expected text": lambda: psgc.push_pull(one, name=cast("Any", 5)),
        "declare.5.: the name is a int": lambda: psgc.declare(cast("Any", 5)),
        "push_pull_group of 5: the name is a int": lambda: psgc.push_pull_group([one], name=cast("Any", 5)),
        "push_pull_group of 'g', tensor 1: expected a tensor": lambda: psgc.push_pull_group([one, cast("Any", 2)], name="g"),
        "broadcast_parameters: the name 0 is a int": lambda: psgc.broadcast_parameters(cast("Any", {0: one})),
        "the first argument is the optimizer, .* got the class SGD": lambda: psgc.DistributedOptimizer(cast("Any", torch.optim.SGD)),
        "got a generator": lambda: psgc.DistributedOptimizer(cast("Any", model.named_parameters()), cast("Any", sgd)),
        "broadcast_optimizer_state: .* got a Linear": lambda: psgc.broadcast_optimizer_state(cast("Any", model)),
        "named_parameters: expected model.named_parameters.., got a Linear": lambda: psgc.DistributedOptimizer(sgd, cast("Any", model)),
        "broadcast_parameters: expected .name, tensor. pairs, got a Linear; pass": lambda: psgc.broadcast_parameters(cast("Any", model)),
        "OneBitAdam: expected model.named_parameters.., got a SGD": lambda: psgc.OneBitAdam(cast("Any", sgd), warmup_steps=3),
        "ZeroOneAdam: expected model.named_parameters.., got a Linear": lambda: psgc.ZeroOneAdam(
            cast("Any", model), warmup_steps=3, local_growth=2
        ),
        "DeMo: expected model.named_parameters.., got a SGD": lambda: psgc.DeMo(cast("Any", sgd)),
        "expected .name, parameter. pairs": lambda: psgc.DistributedOptimizer(sgd, cast("Any", enumerate(model.parameters()))),
    }

    def work(rank: int) -> float:
        for words, call in calls.items():
            with pytest.raises(UsageError, match=words):
                call()
        return psgc.push_pull(torch.tensor(rank + 1.0), average=cast("Any", 0), name="after").item()

    assert ranks.run(2, work) == [3.0, 3.0], "the job goes on"
