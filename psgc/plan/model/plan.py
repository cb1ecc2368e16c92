"""A plan: each bucket's tensors, parts, priority, codec and option; the machines that it is for; and the order of transfers on each link.

Owns the records and their JSON of version 2, which ``planfile`` reads. Does not know what a plan costs or how a job runs it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.documents import shown
from psgc.plan.model.options import Option, all_options, server_options, unknown_actions

VERSION: Final = 2
UNCOMPRESSED: Final = "none"
FIELDS: Final = ("version", "model", "cluster", "buckets", "issue_order", "prediction")  # of a plan's document
# further fields that a planner writes for people; no program reads them
FIGURES: Final = (
    "profile", "optimizer", "step_ms", "fp32_step_ms", "lower_bound_ms", "lower_bound_any_bucketing_ms", "runnable", "select_ms", "bound_ms",
    "options_considered",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One tensor, or several fused in this order, cut into ``parts`` parts, each of which is synchronized as ``option`` says.

    priority:   the bucket with the higher priority is sent first.
    codec:      ``none`` if the option encodes nothing.
    part_numel: elements of each part except the last; 0 if all parts are equal.
    servers:    each part's server, by number; () if unknown, or if the option uses no servers."""

    tensors: tuple[str, ...]
    numel: int
    parts: int
    priority: int
    codec: str
    option: Option
    part_numel: int = 0
    servers: tuple[int, ...] = ()

    def part_sizes(self) -> tuple[float, ...]:
        """Elements of each part. Raises UsageError if the full parts and the last one do not add up to the bucket."""
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
        places = {"servers": list(self.servers)} if self.servers else {}
        return {
            "tensors": list(self.tensors), "numel": self.numel, "parts": self.parts, **cut, "priority": self.priority, "codec": self.codec,
            "option": list(self.option), **places,
        }  # fmt: skip


class Issue(NamedTuple):
    """One transfer of a lane's order. bucket: index into the plan's buckets; step: index into the bucket's option."""

    bucket: int
    part: int
    step: int


class JobShape(NamedTuple):
    """Numbers of processes of a job, or of the job that a plan is for; None: not known. workers: of all nodes together; workers_per_node: None
    if nodes differ."""

    workers: int | None = None
    servers: int | None = None
    nodes: int | None = None
    workers_per_node: int | None = None


NOT_KNOWN: Final = JobShape()


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's text.

    cluster:     the cluster's name.
    prediction:  the planner's figures by name; empty if there are none.
    machines:    the cluster that the plan is for; None if not known.
    shape:       the numbers of processes, as far as they are known.
    issue_order: for each lane of links, the complete order in which its transfers begin; None if not known."""

    model: str
    cluster: str
    buckets: tuple[PlannedBucket, ...]
    prediction: Mapping[str, Any] = field(default_factory=dict)
    machines: Cluster | None = None
    shape: JobShape = NOT_KNOWN
    issue_order: Mapping[str, tuple[Issue, ...]] | None = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Descriptions of what an executor needs, but the plan does not say."""
        placed = all(bucket.servers for bucket in self.buckets if pushes(bucket.option))
        found = {
            "the cluster": self.machines is not None, "the server of each part": placed, "the issue order": self.issue_order is not None
        }  # fmt: skip
        return tuple(what for what, known in found.items() if not known)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON. The order of fields is fixed, so that equal plans give equal files."""
        known = {"workers": self.shape.workers, "servers": self.shape.servers}
        cluster = {"name": self.cluster, **{key: number for key, number in known.items() if number is not None}}
        order = self.issue_order
        orders = {} if order is None else {"issue_order": {lane: [list(issue) for issue in order[lane]] for lane in sorted(order)}}
        return {
            "version": VERSION, "model": self.model, "cluster": cluster if self.machines is None else self.machines.to_json(),
            "buckets": [bucket.to_json() for bucket in self.buckets], **orders, "prediction": _sorted(dict(self.prediction)),
        }  # fmt: skip


def shape_of(cluster: Cluster) -> JobShape:
    """The processes of a job on the cluster."""
    return JobShape(cluster.gpus, cluster.servers, cluster.nodes, cluster.gpus_per_node)


def plan_text(document: Mapping[str, Any]) -> str:
    """A plan's document as the text of its file: one line for each bucket and each lane."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in document.items()) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON on one line, except that the members of a list of objects and of an object of lists have a line each."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(f"  {_compact(one)}" for one in value) + "\n ]"
    if isinstance(value, dict) and value and all(isinstance(one, list) for one in value.values()):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_compact(one)}" for key, one in value.items()) + "\n }"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _sorted(value: Any) -> Any:
    """JSON with every object's keys in alphabetical order."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list | tuple) else value


def pushes(option: Option) -> bool:
    """Whether servers sum in this option."""
    return any(".push" in action for action in option)


@functools.cache
def _every_option() -> frozenset[Option]:
    return frozenset((*all_options(), *server_options()))


def check_option(option: Option, place: str) -> None:
    """Raise UsageError, which names the wrong action, unless the option is one of ``all_options`` or ``server_options``."""
    if option in _every_option():
        return
    for action in unknown_actions(option):
        raise UsageError(f"{place}: unknown action {shown(action)}; psgc options lists those that there are")
    for length in range(1, len(option) + 1):
        if option[:length] not in _beginnings():
            after = f"after {' '.join(option[: length - 1])}" if length > 1 else "at the beginning"
            raise UsageError(f"{place}: option: {option[length - 1]!r} cannot stand {after}; psgc options lists the options that there are")
    raise UsageError(f"{place}: option: {' '.join(option) or 'no action'} ends before every rank has the sum; see psgc options")


@functools.cache
def _beginnings() -> frozenset[Option]:
    return frozenset(option[:length] for option in _every_option() for length in range(1, len(option) + 1))


def check_fits(plan: Plan, numel_by_name: Mapping[str, int], whose: str) -> None:
    """Raise UsageError, which names the first tensor that differs, unless the plan is for exactly these tensors. whose: the owner of the tensors,
    for the message."""
    model = f" ({plan.model})" if plan.model else ""
    other = f"; the plan is for another model{model} or another version of it: make one with psgc plan, from a profile of this one"
    planned: set[str] = set().union(*(bucket.tensors for bucket in plan.buckets))
    for bucket in plan.buckets:
        try:
            size = sum(map(numel_by_name.__getitem__, bucket.tensors))
        except KeyError:
            name = next(name for name in bucket.tensors if name not in numel_by_name)
            raise UsageError(f"plan: it has a tensor {name!r}, {whose} has none such{other}") from None
        if size != bucket.numel:
            raise UsageError(f"plan: the bucket of {bucket.tensors[0]!r} has {bucket.numel} elements, in {whose} it has {size}{other}")
    if numel_by_name.keys() - planned:
        name = next(name for name in numel_by_name if name not in planned)
        raise UsageError(f"plan: no bucket has tensor {name!r} of {whose}{other}")
