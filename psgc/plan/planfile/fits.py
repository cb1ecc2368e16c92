"""Checks that a plan is for this job: for the same processes and the same tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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
