"""Random small problems for tests of planners."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link, load_cluster
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.baselines import with_option
from psgc.plan.model import job
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem

CURVE = CostCurve((1000.0, 100000.0), (5.0, 50.0), (3.0, 30.0))
SLOW = CostCurve((1000.0, 100000.0), (2.0, 150.0), (2.0, 90.0))
ANY = Constraints()
# Jobs whose codec times are not those that docs/results/ has.
load_job, problem_of_profile = partial(job.load_job, measured=None), partial(job.problem_of_profile, measured=None)


def problem_of(
    *tensors: tuple[int, float], nodes: int = 4, gpus: int = 2, gbps: float = 10.0, devices: tuple[str, ...] = ("gpu", "cpu"),
    constraints: Constraints = ANY, servers: int = 0, cores: int = 0,
) -> Problem:  # fmt: skip
    """Tensors of (elements, when ready) in that order, on a small cluster, with a codec of a bit an element."""
    profile = Profile("made", tuple(TensorProfile(f"t{index}", numel, ready) for index, (numel, ready) in enumerate(tensors)))
    cluster = Cluster("made", nodes, gpus, Link(100, 2), Link(gbps, 5), servers, cores=cores)
    codec = CodecCosts("bits", 1 / 8, {device: CURVE if device == "gpu" else SLOW for device in devices})
    return Problem(profile, cluster, codec, constraints)


@st.composite
def problems(draw: Any, most: int = 6, constraints: Constraints = ANY) -> Problem:
    gaps = draw(st.lists(st.integers(0, 400), min_size=1, max_size=most))
    sizes = [draw(st.sampled_from([64, 3000, 50000, 400000])) for _ in gaps]
    ready = [float(sum(gaps[1 : index + 1])) for index in range(len(gaps))]
    nodes, gpus, gbps = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1.0, 10.0, 100.0]))
    cores = draw(st.sampled_from([0, 0, 2, 9]))
    return problem_of(*zip(sizes, ready, strict=True), nodes=nodes, gpus=gpus, gbps=gbps, constraints=constraints, cores=cores)


def bucket_of(problem: Problem, *indices: int, parts: int = 1, option: tuple[str, ...] = ("flat.all_reduce",)) -> PlannedBucket:
    tensors = [problem.profile.tensors[index] for index in indices]
    plain = PlannedBucket(
        tuple(tensor.name for tensor in tensors), sum(tensor.numel for tensor in tensors), parts, -indices[0], UNCOMPRESSED, option
    )
    return with_option(plain, option, problem)


def check_file(cluster: Cluster, path: Path, row: str, wrong: str, message: str) -> None:
    """A cluster's file gives the cluster back; with ``row`` made ``wrong`` it is refused by ``message``."""
    text = cluster.to_toml()
    path.write_text(text)
    assert load_cluster(str(path)) == cluster
    assert row in text
    path.write_text(text.replace(row, wrong))
    with pytest.raises(UsageError, match=message):
        load_cluster(str(path))
