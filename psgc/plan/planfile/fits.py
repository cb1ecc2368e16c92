"""Checks that a plan is for this job: for the same processes and the same tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from psgc.errors import UsageError
from psgc.plan.model.plan import JobShape, Plan, check_fits, pushes

_IN_WORDS: Final = {"workers": "workers", "nodes": "nodes", "workers_per_node": "workers on a node", "servers": "servers"}


def check_job(plan: Plan, shape: JobShape, numel_by_name: Mapping[str, int], whose: str) -> None:
    """Raise UsageError, which names the first difference, unless the plan is for a job of this shape and of exactly these tensors. Numbers that either
    side does not know are not compared, nor is the number of servers if the plan pushes to none. whose: the owner of the tensors, for the
    message."""
    for key, words in _IN_WORDS.items():
        planned, actual = getattr(plan.shape, key), getattr(shape, key)
        if key == "servers" and plan.buckets and not any(pushes(bucket.option) for bucket in plan.buckets):
            continue
        if planned is not None and actual is not None and planned != actual:
            named = f" ({plan.cluster})" if plan.cluster else ""
            raise UsageError(
                f"plan: it is for a job of {planned} {words}{named}, this job has {actual}; make a plan for this job's cluster with psgc plan, or "
                f"start the job that it is for"
            )
    check_fits(plan, numel_by_name, whose)


def other_inside(plan: Plan, inside: Sequence[tuple[tuple[int, ...], int]]) -> str:
    """A line on the nodes whose roots or switches are not those that the plan was made with; "" if there are none, or if the plan has no stage within nodes.
    inside: of each node, its local ranks that are roots (() for all) and how many ranks are behind a switch (0: all)."""
    machines = plan.machines
    if (
        machines is None
        or not machines.inside
        or not any(action.startswith("intra.") for bucket in plan.buckets for action in bucket.option)
    ):
        return ""
    wanted = (machines.reduce_roots, machines.pcie_switch_size)
    others = [str(node) for node, found in enumerate(inside) if found != wanted]
    if not others:
        return ""
    settings = ", ".join(f"{name}={text}" for name, text in machines.inside.items())
    return (
        f"the plan is for nodes with {settings}, which the workers of node {', '.join(others)} have not: sums are right, but travel otherwise than planned; "
        f"where the plan's file is not on a machine, or no launcher of psgc starts its workers, set the same there"
    )
