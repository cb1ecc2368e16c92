"""A plan: every bucket's tensors, cuts, priority, codec and option; and its JSON.

    {"version": 1, "model", "cluster",
     "buckets": [{"tensors": [names], "numel", "parts": K, "priority", "codec": "onebit/int8", "option": [actions]}],
     "prediction": {...}}

A bucket whose parts are not equal has "part_numel", too: the elements of each part but the last.

Owns the shape and its errors. What a plan costs, and who runs it, is others' business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from psgc.errors import UsageError
from psgc.plan.inputs.documents import read_document, shown
from psgc.plan.model.options import Option, all_options, server_options, unknown_actions

VERSION: Final = 1
UNCOMPRESSED: Final = "none"
MOST_PARTS: Final = 1 << 16  # of a bucket; parts of 64 KiB of fp32 then make 4 GiB


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Tensors fused, in this order, or one; cut into ``parts`` equal parts, each of which takes the way that ``option`` says. Of two that
    could travel the one of higher priority does. codec: ``none`` where the option encodes nothing. part_numel: elements of each part but
    the last, where parts are not equal; else 0."""

    tensors: tuple[str, ...]
    numel: int
    parts: int
    priority: int
    codec: str
    option: Option
    part_numel: int = 0

    def part_sizes(self) -> tuple[float, ...]:
        """Elements of each part. Raises UsageError where full parts and a rest do not add up to the bucket."""
        if not self.part_numel:
            return (self.numel / self.parts,) * self.parts
        rest = self.numel - self.part_numel * (self.parts - 1)
        if not 0 < rest <= self.part_numel:
            raise UsageError(
                f"plan: the bucket of {self.tensors[0]!r}: {self.numel} elements are not {self.parts} parts of {self.part_numel}, the last of "
                f"what is left; mend parts or part_numel"
            )
        return (*(float(self.part_numel),) * (self.parts - 1), float(rest))

    def to_json(self) -> dict[str, Any]:
        cut = {"part_numel": self.part_numel} if self.part_numel else {}
        return {
            "tensors": list(self.tensors), "numel": self.numel, "parts": self.parts, **cut, "priority": self.priority, "codec": self.codec,
            "option": list(self.option),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's text. prediction: what a planner says of it, by name; empty for one that nobody predicted."""

    model: str
    cluster: str
    buckets: tuple[PlannedBucket, ...]
    prediction: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION, "model": self.model, "cluster": self.cluster, "buckets": [bucket.to_json() for bucket in self.buckets],
            "prediction": dict(self.prediction),
        }  # fmt: skip


def load_plan(text: str) -> Plan:
    """The plan in a file. Raises UsageError naming the file and the field."""
    return read_plan(read_document(Path(text), f"plan {text}"), text)


def read_plan(document: Any, source: str) -> Plan:
    """A plan from its JSON document. Raises UsageError naming the field."""
    if not isinstance(document, Mapping) or not isinstance(document.get("buckets"), list):
        raise UsageError(f'{source}: expected an object with a list "buckets"')
    if document.get("version") != VERSION:
        raise UsageError(f"{source}: field version is {document.get('version')!r}, expected {VERSION}; make the plan anew with psgc plan")
    prediction = document.get("prediction", {})
    if not isinstance(prediction, Mapping):
        raise UsageError(f"{source}: field prediction is {prediction!r}, expected an object")
    buckets = tuple(_bucket(entry, f"{source}: buckets[{number}]") for number, entry in enumerate(document["buckets"]))
    _check_once(buckets, source)
    return Plan(str(document.get("model", "")), str(document.get("cluster", "")), buckets, dict(prediction))


def _bucket(entry: Any, place: str) -> PlannedBucket:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place}: expected an object with tensors, numel, parts, priority, codec and option")
    tensors, codec, option = entry.get("tensors"), entry.get("codec"), entry.get("option")
    if not _texts(tensors) or not tensors:
        raise UsageError(f"{place}: field tensors is {tensors!r:.80}, expected a list of names")
    if not isinstance(codec, str) or not codec:
        raise UsageError(f"{place}: field codec is {codec!r}, expected a codec's text; none for none")
    if not _texts(option):
        raise UsageError(f"{place}: field option is {option!r:.80}, expected a list of actions")
    numel, parts, priority = _whole(entry, "numel", 1, place), _whole(entry, "parts", 1, place), _whole(entry, "priority", None, place)
    part_numel = _whole(entry, "part_numel", 1, place) if "part_numel" in entry else 0
    if parts > min(numel, MOST_PARTS):
        raise UsageError(f"{place}: field parts is {shown(parts)}, expected no more than its {numel} elements, and {MOST_PARTS:,} at most")
    check_option(tuple(option), place)
    return PlannedBucket(tuple(tensors), numel, parts, priority, codec, tuple(option), part_numel)


def _texts(value: Any) -> TypeGuard[Sequence[str]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)


def _whole(entry: Mapping[str, Any], key: str, least: int | None, place: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise UsageError(f"{place}: field {key} is {shown(value)}, expected a whole number{bound}")
    return value


@functools.cache
def _every_option() -> frozenset[Option]:
    return frozenset((*all_options(), *server_options()))


def check_option(option: Option, place: str) -> None:
    """Raise UsageError, naming the action, unless the option is one of the tree's or of the servers'."""
    if option in _every_option():
        return
    for action in unknown_actions(option):
        raise UsageError(f"{place}: unknown action {action!r}; psgc options lists those that there are")
    for length in range(1, len(option) + 1):
        if option[:length] not in _beginnings():
            after = f"after {' '.join(option[: length - 1])}" if length > 1 else "at the beginning"
            raise UsageError(f"{place}: option: {option[length - 1]!r} cannot stand {after}; psgc options lists the options that there are")
    raise UsageError(f"{place}: option: {' '.join(option) or 'no action'} ends before every rank has the sum; see psgc options")


@functools.cache
def _beginnings() -> frozenset[Option]:
    return frozenset(option[:length] for option in _every_option() for length in range(1, len(option) + 1))


def _check_once(buckets: Sequence[PlannedBucket], source: str) -> None:
    seen: set[str] = set()
    for bucket in buckets:
        for name in bucket.tensors:
            if name in seen:
                raise UsageError(f"{source}: tensor {name!r} stands in two places")
            seen.add(name)


def check_fits(plan: Plan, numel_by_name: Mapping[str, int], whose: str) -> None:
    """Raise UsageError, naming the first tensor that differs, unless the plan is for exactly these tensors. whose: they are, in words."""
    model = f" ({plan.model})" if plan.model else ""
    other = f"; the plan is for another model{model} or another version of it: make one with psgc plan, from a profile of this one"
    planned = {name for bucket in plan.buckets for name in bucket.tensors}
    for bucket in plan.buckets:
        for name in bucket.tensors:
            if name not in numel_by_name:
                raise UsageError(f"plan: it has a tensor {name!r}, {whose} has none such{other}")
        size = sum(numel_by_name[name] for name in bucket.tensors)
        if size != bucket.numel:
            raise UsageError(f"plan: the bucket of {bucket.tensors[0]!r} has {bucket.numel} elements, in {whose} it has {size}{other}")
    for name in numel_by_name:
        if name not in planned:
            raise UsageError(f"plan: no bucket has tensor {name!r} of {whose}{other}")
