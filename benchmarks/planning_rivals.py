"""Random planning jobs, and psgc's plan beside every other method's on each. Run by ``benchmarks/planning.py --rivals``.

The jobs' distribution, each figure drawn by itself from the job's seed, U uniform:

    tensors                 log-uniform over the range that is asked for
    elements of a tensor    10 ** U(2, 7.3)
    gaps between gradients  exponential with mean 10 ** U(2, 4) us
    nodes, GPUs a node      of 1, 2, 4, 8, 16 and of 1, 2, 4, 8; two GPUs at least
    link within a node      10 ** U(1.5, 3.5) Gbit/s, 10 us
    link between nodes      10 ** U(0, 2.6) Gbit/s, 10 ** U(0.7, 2.7) us
    servers                 none in half of the jobs, else 1, 2, 4 or 8, with a link as that between nodes
    codec                   randomk, dgc, efsignsgd or onebit, with the published times of V100 and its host
    constraints             none; in one of six jobs encoding on the GPU alone, in one of six once at most

None of the distribution's figures was chosen with the planner's results in view. Jobs of seeds below 1,000 and from 200,000 to 200,599 were looked
at while the search was made and tuned, so what is reported comes from others: ``--first-seed`` says which. Owns the distribution and the
comparison; a table is the caller's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import V100_CODECS, Profile, TensorProfile
from psgc.plan.methods.anytime import search_for
from psgc.plan.methods.baselines import byteps_compress, fp32, hipress, hitopkcomm
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.search import search
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs

CODECS: Final = ("randomk", "dgc", "efsignsgd", "onebit")
FIRST_SEED: Final = 1_000_000  # nobody has tuned anything on the jobs from here on
ESPRESSO_PATIENCE_S: Final = 20.0
SHORTER: Final = 1e-3  # a rival counts as shorter from here on
RIVALS: Final[Mapping[str, Any]] = {
    "fp32": fp32, "byteps-compress": byteps_compress, "hitopkcomm": hitopkcomm, "hipress": hipress, "espresso": espresso,
}  # fmt: skip


def random_job(seed: int, fewest: int, most: int, of_nodes: Sequence[int] = (1, 2, 4, 8, 16)) -> Problem:
    """The job of this seed, of the distribution above. of_nodes: the numbers of nodes that a job may have."""
    rng = np.random.default_rng([seed, fewest, most])
    count = int(np.clip(round(np.exp(rng.uniform(np.log(fewest - 0.5), np.log(most + 0.5)))), fewest, most))
    ready = np.cumsum(rng.exponential(10 ** rng.uniform(2, 4), count))
    numel = np.ceil(10 ** rng.uniform(2, 7.3, count))
    tensors = tuple(TensorProfile(f"t{at}", int(n), float(us - ready[0])) for at, (n, us) in enumerate(zip(numel, ready, strict=True)))
    profile = Profile(f"random {seed}", tensors, codecs=V100_CODECS)
    nodes, gpus = int(rng.choice(of_nodes)), int(rng.choice([1, 2, 4, 8]))
    nodes = 2 if nodes * gpus == 1 else nodes
    intra = Link(float(10 ** rng.uniform(1.5, 3.5)), 10.0)
    inter = Link(float(10 ** rng.uniform(0, 2.6)), float(10 ** rng.uniform(0.7, 2.7)))
    servers = int(rng.choice([1, 2, 4, 8])) if rng.random() < 0.5 else 0
    codec = str(rng.choice(CODECS))
    kind = int(rng.integers(6))
    devices = ("gpu",) if kind == 0 else ("gpu", "cpu")
    constraints = Constraints(devices, 1 if kind == 1 else None, servers=servers > 0)
    cluster = Cluster("random", nodes, gpus, intra, inter, servers)
    return Problem(profile, cluster, codec_costs(codec, profile, cluster.gpus), constraints)


def compared(seed: int, fewest: int, most: int, seconds: float | None = None) -> dict[str, Any]:
    """One job: our step, the time that the search took, and each rival's step, with its own buckets and with ours. seconds: of the search, in
    place of the default."""
    problem = random_job(seed, fewest, most)
    ours = search(problem) if seconds is None else search_for(problem, seconds)
    steps: dict[str, float] = {}
    for name, rival in RIVALS.items():
        for label, buckets in ((name, None), (f"{name}, our buckets", ours.buckets)):
            step = _step(name, rival, problem, buckets)
            if step is not None:
                steps[label] = step
    return {
        "seed": seed, "tensors": [fewest, most], "count": len(problem.profile.tensors), "servers": problem.cluster.servers,
        "seconds": seconds, "step_us": ours.step_us, "select_us": ours.select_us, "rivals": steps,
    }  # fmt: skip


def _step(name: str, rival: Any, problem: Problem, buckets: Sequence[PlannedBucket] | None) -> float | None:
    """A rival's step; None where it has no plan for the job, or takes too long."""
    patience = {"patience_s": ESPRESSO_PATIENCE_S} if name == "espresso" else {}
    try:
        return float(rival(problem, buckets, **patience).step_us)
    except UsageError:
        return None


def run(
    count: int, fewest: int, most: int, out: Path | None, seconds: float | None = None, first: int = FIRST_SEED
) -> list[dict[str, Any]]:
    """Compare on the jobs of ``count`` seeds from ``first`` on. out: results, a line each; those that are in it already are not computed again."""
    known = {row["seed"]: row for row in kept(out) if row["tensors"] == [fewest, most] and row["seconds"] == seconds}
    seeds = range(first, first + count)
    for seed in seeds:
        if seed not in known:
            known[seed] = compared(seed, fewest, most, seconds)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(known[seed]) + "\n")
    return [known[seed] for seed in seeds]


def kept(out: Path | None) -> Iterator[dict[str, Any]]:
    """The results in a file, if there is one."""
    if out is not None and out.is_file():
        for line in out.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the process ended while it wrote this line
                continue


def excess(row: Mapping[str, Any]) -> float:
    """How much longer our step is than the shortest rival's, as a share; negative where ours is shorter."""
    return row["step_us"] / min(row["rivals"].values()) - 1


def summary(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What the comparison shows, in lines."""
    every = list(rows)
    behind = sorted((row for row in every if excess(row) > SHORTER), key=excess, reverse=True)
    times = sorted(row["select_us"] / 1e3 for row in every)
    yield (
        f"{len(every)} jobs: a rival is shorter by more than {SHORTER:.1%} on {len(behind)} ({len(behind) / len(every):.1%}); "
        f"the search took {statistics.median(times):.1f} ms in the median, {times[-1]:.1f} at most"
    )
    for row in behind[:10]:
        name = min(row["rivals"], key=row["rivals"].__getitem__)
        yield f"  seed {row['seed']}, {row['count']} tensors, {row['servers']} servers: {name} is {excess(row) / (1 + excess(row)):.2%} shorter"
