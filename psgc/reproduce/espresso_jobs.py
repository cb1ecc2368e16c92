"""The six training jobs of Espresso (Wang et al., EuroSys 2023), from the paper's figures: models, codecs, test beds, what it measured.

Owns the paper's numbers and the problems made of them; no trace is needed. A model's tensors are its architecture's; they are ready over
a backward as long as the public artifact's trace, spread as the layers' FLOPs. What is left of the paper's own zero-cost iteration
("Upper Bound") counts as forward.

Sources, of that paper if no other is named: batches, table 4; models, codecs and clusters, section 5.1; throughputs of 64 GPUs read off figures 12
(NVLink) and 13 (PCIe), to about 3 %; gains over other systems, the text of section 5.2; the length of backward, the sum of the gaps in the artifact's
scheduler/model_tensor.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from psgc.plan.inputs.cluster import Cluster, load_cluster
from psgc.plan.inputs.profile import V100_CODECS, Profile, TensorProfile, computed_profile
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, codec_costs

GPUS: Final = 64
NODES: Final = (1, 2, 4, 8)  # of 8 GPUs each
BEDS: Final = ("espresso-nvlink", "espresso-pcie")
# Payload bytes an element: 1 % of the values with a 4-byte index each; one bit.
PAPER_BYTES: Final = {"randomk": 0.08, "dgc": 0.08, "efsignsgd": 0.125}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """items: of a GPU and step; backward_us: of one step; throughput: items a second of all 64 GPUs, by system, with that of free
    compression as ``upper``; gains: how much more than a system Espresso trains; select_ms: of Espresso's selection (table 5, NVLink)."""

    model: str
    codec: str
    bed: str
    items: int
    backward_us: float
    throughput: Mapping[str, float]
    gains: Mapping[str, float]
    select_ms: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.codec}, {self.bed.removeprefix('espresso-')}"

    @property
    def forward_us(self) -> float:
        """What an iteration with free compression takes beside backward: forward and the optimizer."""
        return max(0.0, self.iteration_us("upper") - self.backward_us)

    def iteration_us(self, system: str) -> float:
        """What an iteration on 64 GPUs takes by the figures."""
        return GPUS * self.items / self.throughput[system] * 1e6


def _bars(fp32: float, byteps: float, hitopkcomm: float, hipress: float, espresso: float, upper: float) -> dict[str, float]:
    return {"fp32": fp32, "byteps-compress": byteps, "hitopkcomm": hitopkcomm, "hipress": hipress, "espresso": espresso, "upper": upper}


JOBS: Final = (
    Job(
        "bert-base", "randomk", BEDS[0], 1024, 66_335, _bars(130e3, 157e3, 133e3, 147e3, 210e3, 225e3),
        {"byteps-compress": 0.31, "hitopkcomm": 0.54, "hipress": 0.40}, 125,
    ),
    Job(
        "gpt2", "efsignsgd", BEDS[0], 80, 211_329, _bars(6750, 7750, 6900, 8200, 10900, 11250), {"byteps-compress": 0.42, "hipress": 0.33}, 99,
    ),
    Job(
        "ugatit", "dgc", BEDS[0], 2, 434_241, _bars(45, 36, 74, 83, 111, 117),
        {"fp32": 1.49, "byteps-compress": 2.05, "hitopkcomm": 0.50, "hipress": 0.35}, 84,
    ),
    Job(
        "vgg16", "randomk", BEDS[1], 32, 85_310, _bars(3300, 2700, 7000, 7900, 12300, 13400),
        {"fp32": 2.69, "byteps-compress": 3.57, "hipress": 0.55}, 17,
    ),
    Job(
        "lstm", "efsignsgd", BEDS[1], 80, 71_450, _bars(9800, 8700, 10000, 9800, 17400, 19200),
        {"byteps-compress": 1.01, "hitopkcomm": 0.73, "hipress": 0.77}, 1,
    ),
    Job(
        "resnet101", "dgc", BEDS[1], 32, 120_391, _bars(7800, 7850, 3600, 7600, 9300, 10000),
        {"fp32": 0.20, "byteps-compress": 0.18, "hipress": 0.24}, 179,
    ),
)  # fmt: skip
# U-GAT-IT's discriminators run backward first, then the generators' forward takes most of a step, then the generators run backward.
UGATIT_DISCRIMINATORS_US, UGATIT_GENERATORS_US = 24_500.0, 359_830.0


@functools.cache
def profile_of(job: Job) -> Profile:
    """The job's profile: its architecture's tensors, ready within the published backward."""
    computed = computed_profile(job.model, "v100", job.items)
    ready = _stretched(computed.tensors, 0.0, job.backward_us)
    if job.model == "ugatit":
        first = [tensor for tensor in computed.tensors if tensor.name.startswith("dis")]
        then = [tensor for tensor in computed.tensors if not tensor.name.startswith("dis")]
        ready = (*_stretched(first, 0.0, UGATIT_DISCRIMINATORS_US), *_stretched(then, UGATIT_GENERATORS_US, job.backward_us))
    return replace(
        computed, tensors=ready, codecs=V100_CODECS, forward_us=job.forward_us, device="", hardware="", source="Wang et al. 2023"
    )


def _stretched(tensors: list[TensorProfile] | tuple[TensorProfile, ...], begin_us: float, end_us: float) -> tuple[TensorProfile, ...]:
    """The tensors, ready between these times in proportion to when they were."""
    first, last = tensors[0].ready_us, tensors[-1].ready_us
    scale = (end_us - begin_us) / (last - first)
    return tuple(replace(tensor, ready_us=begin_us + (tensor.ready_us - first) * scale) for tensor in tensors)


def cluster_of(job: Job, *, nodes: int = 8, achieved: float = 1.0, bed: str = "") -> Cluster:
    """The job's test bed. achieved: the share of the nominal rate that the links between nodes reach."""
    cluster = load_cluster(bed or job.bed)
    return replace(cluster, nodes=nodes, inter=replace(cluster.inter, gbps=achieved * cluster.inter.gbps))


def problem_of(
    job: Job, *, nodes: int = 8, achieved: float = 1.0, bed: str = "", profile: Profile | None = None, constraints: Constraints | None = None
) -> Problem:  # fmt: skip
    """The planning problem of a job, with the paper's payload sizes. profile: in place of the job's."""
    cluster = cluster_of(job, nodes=nodes, achieved=achieved, bed=bed)
    given = profile_of(job) if profile is None else profile
    costs = replace(codec_costs(job.codec, given, cluster.gpus), bytes_per_element=PAPER_BYTES[job.codec], pull_bytes_per_element=None)
    return Problem(given, cluster, costs, Constraints() if constraints is None else constraints)


def iteration_us(job: Job, step_us: float) -> float:
    """A whole iteration with a step (backward and synchronization) of that length."""
    return job.forward_us + step_us
