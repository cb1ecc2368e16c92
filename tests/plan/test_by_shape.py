"""Plans from traces, whose tensors are named after their shapes: matched with a model's tensors, or refused by the first that does not match."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.plan.inputs.shape_names import name_of, shape_in
from psgc.plan.model.options import OVER_SERVERS
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.planfile.by_shape import matched
from tests.cases import for_each

LAYERS = (("a.weight", (4, 3)), ("a.bias", (4,)), ("b.weight", (4, 4)), ("b.bias", (4,)), ("c.scale", ()))
TENSORS = tuple(TensorSpec(name, shape, "float32") for name, shape in LAYERS)


def plan_of(*buckets: tuple[str, ...]) -> Plan:
    """A plan of tensors with these names, which have a trace's form."""
    planned = []
    for names in buckets:
        shapes = [found[0] for name in names if (found := shape_in(name)) is not None]
        planned.append(PlannedBucket(names, sum(map(math.prod, shapes)), 1, 0, UNCOMPRESSED, OVER_SERVERS[0]))
    return Plan("traced", "c", tuple(planned))


def test_the_nth_ready_gradient_of_a_shape_is_the_nth_from_the_end_of_the_models() -> None:
    found = matched(plan_of(("scalar.0", "4.0", "4x4.0"), ("4.1", "4x3.0")), TENSORS)
    assert [bucket.tensors for bucket in found.plan.buckets] == [("c.scale", "b.bias", "b.weight"), ("a.bias", "a.weight")]
    assert (found.by_order, found.first) == (2, ("4.0", "b.bias")), "the two biases are told apart by their order only"


def test_tensors_of_one_shape_in_one_bucket_need_no_order() -> None:
    found = matched(plan_of(("4.0", "4.1"), ("scalar.0", "4x4.0", "4x3.0")), TENSORS)
    assert (found.by_order, found.first) == (0, ("", ""))


@for_each(wrong=[
    (("4.0", "4.1", "4.2", "4x4.0", "4x3.0", "scalar.0"), "the trace has 3 tensors of 4 .the first that does not match is '4.2'., this model 2 tensors of 4;"),
    (("4.0", "4.1", "3x4.0", "4x4.0", "scalar.0"), "the trace has 1 tensor of 3x4 .the first that does not match is '3x4.0'., this model no tensors of 3x4;"),
    (("4.0", "4x4.0", "4x3.0", "scalar.0"), "this model has 2 tensors of 4 .the first that does not match is 'a.bias'., the trace 1 tensor of 4;"),
    (("4.0", "4.1", "4x4.0", "4x3.0"), "this model has 1 tensor of scalar .the first that does not match is 'c.scale'., the trace no tensors of scalar;"),
])  # fmt: skip
def test_the_first_tensor_that_does_not_match_is_named_in_one_line(wrong: tuple[tuple[str, ...], str]) -> None:
    names, said = wrong
    with pytest.raises(UsageError, match=said) as caught:
        matched(plan_of(names), TENSORS)
    assert "\n" not in str(caught.value)
    assert "psgc profile --script, which has names" in str(caught.value), "a remedy that is not another plan from the same trace"


def test_a_plan_with_names_and_a_model_whose_names_look_like_shapes_stay_as_they_are() -> None:
    named = Plan("m", "c", (PlannedBucket(("a.weight", "4.0"), 16, 1, 0, UNCOMPRESSED, OVER_SERVERS[0]),))
    assert matched(named, TENSORS).plan is named
    numbered = plan_of(("4.0", "4.1"))
    model = tuple(TensorSpec(name, (4,), "float32") for name in ("4.0", "4.1"))
    assert matched(numbered, model).plan is numbered


@given(shapes=st.lists(st.sampled_from([(), (2,), (2, 3), (3, 2), (6,), (0, 5)]), min_size=1, max_size=12), cut=st.integers(1, 12))
def test_every_tensor_with_elements_is_matched_once_and_by_its_shape(shapes: list[tuple[int, ...]], cut: int) -> None:
    tensors = tuple(TensorSpec(f"layer{number}", shape, "float32") for number, shape in enumerate(shapes))
    seen: Counter[tuple[int, ...]] = Counter()
    names = []
    for tensor in reversed(tensors):
        if tensor.numel:
            names.append(name_of(tensor.shape, seen[tensor.shape]))
            seen[tensor.shape] += 1
    if not names:
        return
    plan = plan_of(*(each for each in (tuple(names[:cut]), tuple(names[cut:])) if each))
    found = [name for bucket in matched(plan, tensors).plan.buckets for name in bucket.tensors]
    assert found == [tensor.name for tensor in reversed(tensors) if tensor.numel], (
        "a model whose backward goes through its layers in reverse"
    )
