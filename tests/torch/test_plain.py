"""Plain objects come back as they were; what is not plain is refused and named; no bytes run code or take memory that they do not hold."""

from __future__ import annotations

import argparse
import math
import pickle
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import RemoteProtocolError, UsageError
from psgc.torch.tensors.plain import TensorPlace, decode, encode

KEYS = st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=5) | st.binary(max_size=5) | st.tuples(st.integers())
PLAIN = st.recursive(
    KEYS | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(PLAIN)
def test_what_is_plain_comes_back_the_same_in_value_and_type(value: Any) -> None:
    assert same(decode(encode(value, "it")), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1 << 4000, -(1 << 4000), "", "\ud800", b"", [], (), {}, set()])
def test_the_edges_of_plain_types_come_back(value: Any) -> None:
    back = decode(encode(value, "it"))
    assert same(back, value)
    assert math.copysign(1, back) == math.copysign(1, value) if isinstance(value, float) else True


def test_nan_stays_nan() -> None:
    assert math.isnan(decode(encode(math.nan, "it")))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape) % 2).to(dtype)
    back = decode(encode({"t": tensor}, "it"))["t"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.float() if dtype == torch.float8_e4m3fn else back, tensor.float() if dtype == torch.float8_e4m3fn else tensor)
    if tensor.numel():
        back.zero_()  # its memory is its own


def test_views_parameters_and_what_wants_a_gradient_come_back() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.zeros(2, requires_grad=True)
    views = [whole.t(), whole[::2, 1:], torch.ones(1).expand(5), torch.tensor([1 + 2j]).conj()]
    *back, p, q = decode(encode([*views, parameter, leaf], "it"))
    for got, want in zip(back, views, strict=True):
        assert torch.equal(got, want)
    assert type(p) is torch.nn.Parameter
    assert (p.requires_grad, q.requires_grad) == (False, True)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3), np.array(3), np.zeros((2, 0)), np.array(["ab", "c"]), np.array([True]), np.array([b"x"]),
        np.array([1 + 2j]), np.array(["2026-11-22"], "datetime64[D]"), np.asfortranarray(np.eye(3)), np.arange(4, dtype=">i4"),
    ],
)  # fmt: skip
def test_arrays_come_back_to_the_bit(value: Any) -> None:
    back = decode(encode(value, "it"))
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert (back == value).all()


def test_scalars_dtypes_sizes_devices_and_places_come_back() -> None:
    value = [
        np.float32(1.5),
        np.int64(3),
        np.bool_(True),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cpu"),
        TensorPlace(3, (2, 1), torch.int8),
    ]
    assert same(decode(encode(value, "it")), value)


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code has run",))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (argparse.Namespace(a=1), r"it is a argparse\.Namespace"),
        ({"model": {"fn": len}}, r"it\['model'\]\['fn'\] is a builtins\.builtin_function_or_method"),
        ([1, (2, object())], r"it\[1\]\[1\] is a builtins\.object"),
        (defaultdict(int), "defaultdict"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (np.array([object()]), "numpy.ndarray"),
        ({Evil(): 1}, "a key of it"),
    ],
)
def test_what_is_not_plain_is_refused_saying_where_it_is_and_what_to_do(value: Any, where: str) -> None:
    with pytest.raises(UsageError, match=where) as caught:
        encode(value, "it")
    assert "allow_pickle=True" in str(caught.value)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        encode(loop, "it")


@given(st.binary(max_size=100))
def test_any_bytes_are_a_value_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except RemoteProtocolError:
        return
    encode(value, "it")


@given(PLAIN, st.data())
def test_bytes_with_one_changed_or_the_end_missing_are_a_value_or_are_refused(value: Any, data: st.DataObject) -> None:
    spoilt = bytearray(encode([value, torch.ones(3), np.ones(2), torch.float32], "it"))
    at = data.draw(st.integers(0, len(spoilt) - 1))
    if data.draw(st.booleans()):
        del spoilt[at:]
    else:
        spoilt[at] ^= data.draw(st.integers(1, 255))
    try:
        decode(spoilt)
    except RemoteProtocolError:
        return


def test_a_pickle_is_never_read() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(pickle.dumps(Evil()))


@pytest.mark.parametrize("tag", [b"l", b"m", b"s", b"b", b"t", b"a", b"z"])
def test_a_count_beyond_the_bytes_is_refused_before_memory_is_taken_for_it(tag: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(tag + (1 << 62).to_bytes(8, "little") + bytes(64))
