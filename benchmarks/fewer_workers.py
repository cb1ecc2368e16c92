"""What a plan loses when workers are missing (PSGC_ON_WORKER_LOSS=shrink): the steps of the ranks that are left, by the plan of all, and by a plan for them.

    python benchmarks/fewer_workers.py

Jobs as shrink takes them, every rank pushing all to servers on hosts of their own, as many as nodes of one GPU each; known models, int8. A plan's steps
are simulated, as ``psgc simulate`` does. Owns the jobs, and the comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from psgc.launch.gpu_results import with_measured_codecs
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.methods.search import search
from psgc.plan.model.job import load_job
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, simulate

MODELS: Final = ("gpt2", "bert-base", "resnet101", "vgg16")
GBPS: Final = (1.0, 10.0, 25.0, 100.0)
LOST: Final = ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4))  # workers, and how many of them are missing
SERVED: Final = Constraints(servers=True, runtime=True, among_workers=False)


@dataclass(frozen=True, slots=True)
class Loss:
    """kept_us: a step by the plan of all workers; anew_us: by one that is made for those that are left."""

    model: str
    gbps: float
    workers: int
    missing: int
    kept_us: float
    anew_us: float

    @property
    def longer(self) -> float:
        return self.kept_us / self.anew_us - 1


def problem_of(model: str, gbps: float, workers: int, servers: int, gpu: str) -> Problem:
    cluster = Cluster(f"{workers} nodes", workers, 1, intra=Link(100, 10), inter=Link(gbps, 50), servers=servers, server=Link(gbps, 50))
    return load_job(model, cluster, "int8", SERVED, gpu=gpu, measured=with_measured_codecs).problem


def losses(gpu: str) -> Iterator[Loss]:
    for model in MODELS:
        for gbps in GBPS:
            for workers, missing in LOST:
                before = search(problem_of(model, gbps, workers, workers, gpu))
                left = problem_of(model, gbps, workers - missing, workers, gpu)
                kept, anew = (simulate(left, plan.buckets).step_us for plan in (before, search(left)))
                yield Loss(model, gbps, workers, missing, kept, anew)


def said(found: list[Loss]) -> list[str]:
    """A line for each link: by how much steps are longer than need be."""
    by_link = {gbps: sorted(loss.longer for loss in found if loss.gbps == gbps) for gbps in sorted({loss.gbps for loss in found})}
    return [
        f"{gbps:g} Gbit/s: {len(longer)} jobs; by the plan of all, steps are {statistics.median(longer):.1%} longer (median), {longer[-1]:.1%} at most"
        for gbps, longer in by_link.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="a100", help="whose backward and codec times (default: a100)")
    parser.add_argument("--json", action="store_true", help="a document in place of lines")
    given = parser.parse_args()
    found = list(losses(given.gpu))
    document: list[dict[str, Any]] = [asdict(loss) for loss in found]
    print(json.dumps(document) if given.json else "\n".join(said(found)))


if __name__ == "__main__":
    main()
