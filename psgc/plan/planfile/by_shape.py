"""Names for the tensors of a plan that was made from a trace: a model's own, matched by shape and by order.

A trace tells the shapes of gradients, and when each was ready, but no names; ``traces`` names them after their shapes: ``700x500.0`` is the first gradient of
700 x 500 that is ready, ``700x500.1`` the next one. The n-th such gradient is taken to be the n-th from the end of the model's tensors of that shape, because
backward goes through layers from the last one back. Where a model uses its layers in another order, a wrong match costs time only: what is exchanged has the
same shape. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.plan.inputs.shape_names import Shape, shape_in, shape_text
from psgc.plan.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Matched:
    """A plan with the model's names. by_order: how many tensors have a shape that tensors of other buckets have, too, so that only the order tells them apart;
    first: the first of these, with the name that the trace gave it; both "" if there is none."""

    plan: Plan
    by_order: int
    first: tuple[str, str] = ("", "")


def is_named_by_shape(plan: Plan) -> bool:
    """Whether all tensors of the plan have names that a trace gave them."""
    return bool(plan.buckets) and all(shape_in(name) is not None for bucket in plan.buckets for name in bucket.tensors)


def matched(plan: Plan, tensors: Sequence[TensorSpec]) -> Matched:
    """The plan with these tensors' names, if its own are a trace's and not the tensors' own; else the plan as it is. tensors: in the order of their layers.
    Raises UsageError, which names the first tensor that does not match."""
    own = {tensor.name for tensor in tensors}
    planned = [name for bucket in plan.buckets for name in bucket.tensors]
    if not is_named_by_shape(plan) or own.issuperset(planned):
        return Matched(plan, 0)
    of_shape: dict[Shape, list[str]] = {}
    for tensor in reversed(tensors):
        if tensor.numel:
            of_shape.setdefault(tensor.shape, []).append(tensor.name)
    given = _given(planned, of_shape)
    taken = set(given.values())
    for tensor in reversed(tensors):
        if tensor.numel and tensor.name not in taken:
            raise UsageError(_refusal(f"this model has {_counted(of_shape, tensor.shape)} (the first that does not match is {tensor.name!r}), the trace "
                                      f"{_counted(_shapes(planned), tensor.shape)}"))  # fmt: skip
    buckets = tuple(replace(bucket, tensors=tuple(given[name] for name in bucket.tensors)) for bucket in plan.buckets)
    doubtful = _in_several_buckets(plan)
    first = next((name for name in planned if name in doubtful), "")
    return Matched(replace(plan, buckets=buckets), len(doubtful), (first, given[first]) if first else ("", ""))


def _given(planned: Sequence[str], of_shape: Mapping[Shape, Sequence[str]]) -> dict[str, str]:
    """The model's name for each of the trace's. Raises UsageError for the first that has none."""
    given = {}
    for name in planned:
        shape, number = shape_in(name) or ((), 0)
        candidates = of_shape.get(shape, ())
        if number >= len(candidates):
            raise UsageError(_refusal(f"the trace has {_counted(_shapes(planned), shape)} (the first that does not match is {name!r}), this model "
                                      f"{_counted(of_shape, shape)}"))  # fmt: skip
        given[name] = candidates[number]
    return given


def _refusal(difference: str) -> str:
    return (
        f"plan: it was made from a trace, so its tensors are matched with this model's by shape: {difference}; trace the very model that the job trains, "
        f"or make the profile with psgc profile --script, which has names"
    )


def _shapes(planned: Sequence[str]) -> dict[Shape, list[str]]:
    found: dict[Shape, list[str]] = {}
    for name in planned:
        shape, _ = shape_in(name) or ((), 0)
        found.setdefault(shape, []).append(name)
    return found


def _counted(of_shape: Mapping[Shape, Sequence[str]], shape: Shape) -> str:
    number = len(of_shape.get(shape, ()))
    return f"{number or 'no'} tensor{'' if number == 1 else 's'} of {shape_text(shape)}"


def _in_several_buckets(plan: Plan) -> set[str]:
    """The trace's names of the tensors whose shape occurs in more than one bucket."""
    buckets: dict[Shape, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for shape in _shapes(bucket.tensors):
            buckets.setdefault(shape, set()).add(number)
    return {
        name for bucket in plan.buckets for shape, names in _shapes(bucket.tensors).items() if len(buckets[shape]) > 1 for name in names
    }
