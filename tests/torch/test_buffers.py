"""Torch tensors as a bucket: packed in logical order, used in place where they can be, cast back exactly."""

from __future__ import annotations

import pytest
import torch

from psgc.errors import UsageError
from psgc.torch.tensors.buffers import TORCH_DTYPES, TensorsBuffer, as_array, copy_elements, dtype_name, staging_dtype

STRANGE = [
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.arange(20.0)[::3],
    torch.tensor(5.0),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.empty(0, 3),
]


def bound(tensors: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> TensorsBuffer:
    buffer = TensorsBuffer([tuple(t.shape) for t in tensors], dtype)
    buffer.bind(tensors)
    return buffer


def test_a_lone_contiguous_tensor_is_used_in_place() -> None:
    tensor = torch.zeros(3, 4)
    buffer = bound([tensor])
    buffer.load()[:] = 7
    assert tensor.eq(7).all()


def test_tensors_are_packed_and_unpacked_in_logical_order() -> None:
    tensors = [t.clone() for t in STRANGE]
    buffer = bound(tensors)
    array = buffer.load()
    assert array.tolist() == torch.cat([t.reshape(-1) for t in STRANGE]).tolist()
    array += 1
    buffer.store(False)
    assert all(torch.equal(after, before + 1) for after, before in zip(tensors, STRANGE, strict=True))


def test_a_skipped_step_leaves_tensors_alone() -> None:
    tensors = [t.clone() for t in STRANGE]
    buffer = bound(tensors)
    buffer.load()[:] = 99
    buffer.store(True)
    assert buffer.skipped
    assert all(torch.equal(after, before) for after, before in zip(tensors, STRANGE, strict=True))


def test_a_missing_tensor_counts_as_zeros_and_is_made() -> None:
    like = torch.ones(2, 3)
    buffer = TensorsBuffer([(2, 3), (2,)], torch.float32)
    buffer.bind([None, torch.ones(2)], [like, torch.ones(2)])
    array = buffer.load()
    assert array.tolist() == [0] * 6 + [1] * 2
    array[:] = 4
    buffer.store(False)
    made, none = buffer.made
    assert made is not None and torch.equal(made, torch.full((2, 3), 4.0)) and none is None


def test_a_buffer_serves_step_after_step() -> None:
    buffer = TensorsBuffer([(2,), (1,)], torch.float32)
    for value in range(3):
        tensors = [torch.full((2,), float(value)), torch.zeros(1)]
        buffer.bind(tensors)
        buffer.load()[2] = value
        buffer.store(False)
        assert tensors[1].item() == value


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_casts_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).mul(100).to(source).t()
    out = torch.empty(1000, 3, dtype=target)
    copy_elements(values, out)
    # float64 to bfloat16 passes through float32, in torch too
    assert torch.equal(out, values.float().to(target) if target == torch.bfloat16 else values.to(target))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_that_layouts_know_travels_as_it_is(name: str) -> None:
    tensors = [torch.tensor([0, 1, 1], dtype=TORCH_DTYPES[name]), torch.tensor([1, 0], dtype=TORCH_DTYPES[name])]
    buffer = bound(tensors, staging_dtype("none", name))
    array = buffer.load()
    assert array.itemsize == tensors[0].itemsize and array.size == 5
    array[:] = array[::-1].copy()
    buffer.store(False)
    assert torch.cat(tensors).tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_lossy_codecs_get_float32(name: str) -> None:
    assert staging_dtype("int8", name) == torch.float32


def test_bfloat16_is_seen_as_its_bits() -> None:
    assert as_array(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [0x3F80]


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.uint16), torch.zeros(2).to_sparse()])
def test_what_psgc_does_not_carry_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"tensor 'x': psgc .*(uint16|sparse_coo)"):
        dtype_name(tensor, "tensor 'x'")


def test_a_tensor_on_a_device_that_psgc_does_not_carry_is_named() -> None:
    with pytest.raises(UsageError, match=r"fc: it lies on meta; psgc carries tensors of the CPU and of CUDA devices"):
        dtype_name(torch.empty(3, device="meta"), "fc")
