"""Random plans that jobs with gradients on GPUs can run: any option, over servers and among workers, encoded and decoded on either device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from psgc.codecs import BLOCK
from psgc.plan.model.options import all_options, encodes, server_options
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.planfile.runtime import check_runs

CODECS = ("bf16", "int8", "onebit", "topk:k=0.05", "onebit/int8", "int8/none")


def random_plan(seed: int, sizes: Mapping[str, int]) -> Plan:
    """sizes: elements by tensor."""
    random = np.random.default_rng(seed)
    names = [str(name) for name in random.permutation(list(sizes))]
    options, buckets = (server_options(), all_options()), []
    while names:
        count = int(random.integers(1, len(names) + 1))
        members, names = tuple(names[:count]), names[count:]
        numel, kind = sum(sizes[name] for name in members), options[random.integers(2)]
        option = kind[random.integers(len(kind))]
        codec = CODECS[random.integers(len(CODECS))] if encodes(option) else "none"
        parts = int(random.integers(1, min(3, -(-numel // BLOCK)) + 1))
        buckets.append(PlannedBucket(members, numel, parts, -len(buckets), codec, option))
    plan = Plan(f"random {seed}", "any", tuple(buckets))
    check_runs(plan, plan.model)
    return plan


def float_plan(sizes: Mapping[str, int]) -> Plan:
    """Collectives of floats alone, among all workers."""
    options = (("flat.reduce_scatter", "flat.all_gather"), ("flat.all_reduce",), ("flat.reduce", "flat.broadcast"))
    names = list(sizes)
    buckets = tuple(
        PlannedBucket(tuple(members), sum(sizes[name] for name in members), 1, -number, "none", option)
        for number, option in enumerate(options)
        if (members := names[number :: len(options)])
    )
    plan = Plan("floats", "any", buckets)
    check_runs(plan, plan.model)
    return plan


def on_cpus(plan: Plan) -> Plan:
    """The same plan with everything encoded and decoded on CPUs."""
    buckets = (replace(b, option=tuple(action.replace("@gpu", "@cpu") for action in b.option)) for b in plan.buckets)
    return replace(plan, buckets=tuple(buckets))
