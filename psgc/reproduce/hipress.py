"""HiPress's experiments (Bai et al., SOSP 2021): what SeCoPa decides, what CaSync moves, batches of small gradients, CompLL's programs.

Owns which experiment asks what. SeCoPa's formulas are those of ``psgc.plan.methods.baselines``; jobs are those of ``espresso_jobs.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.baselines import (
    GPU_OVER_NODES,
    byteps_compress,
    hipress,
    secopa,
    tensor_by_tensor,
    with_option,
)
from psgc.plan.model.collectives import RINGS, volume_and_messages
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import is_uncompressed
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from psgc.reproduce.claims import Claim, Experiment
from psgc.reproduce.compll import PROGRAMS, lines_of
from psgc.reproduce.espresso_jobs import JOBS, Job, iteration_us, problem_of

PAPER: Final = "Bai et al. 2021"
ARTIFACT: Final = "the public artifact's SeCoPa.py"
# SeCoPa's constants, fitted by its authors on their cluster: a message's rate in GB/s and its fixed time, encoding's, and TBQ's ratio. Of the fixed time of
# a message and of decoding only the results' sizes are known; these give them.
SEND_GBPS, SEND_US = 8 * 4.7, 170.0
ENCODE_GB_PER_S, ENCODE_US = 283.0, 57.0
DECODE_US = 50.0
TBQ_BYTES: Final = 4 / 16  # an element
FC6_NUMEL: Final = 25088 * 4096  # VGG-19's largest tensor, 392 MiB
FC6_MS: Final = {4: (132.0, 11.7), 16: (168.0, 18.9)}  # nodes: the best uncompressed, and compressed
FIRST_COMPRESSED: Final = {4: 4 << 20, 8: 8 << 20, 16: 16 << 20}  # nodes: the least power of two of bytes
LINES: Final = {"Onebit": (21, 9), "Tbq": (13, 18), "TernGrad": (23, 7), "Dgc": (29, 15), "GradDrop": (29, 21)}  # table 5: logic, functions
SMALL_NUMEL, BATCH_NUMEL = 1 << 16, 1 << 18
HEADLINE: Final = (0.172, 0.695)
FLAT: Final = "in the artifact a message below about 1 MB costs what one of 1 MB does; our formulas add a fixed time to the bytes'"


def _authors_problem(nodes: int, *, encodes: bool = True) -> Problem:
    """A cluster with the artifact's constants. encodes: whether encoding takes what it takes there, and not for ever."""
    sizes = (1.0, 2.0**30)
    slope = 4e-3 / ENCODE_GB_PER_S if encodes else 1e9
    curve = CostCurve(sizes, tuple(ENCODE_US + n * slope for n in sizes), (DECODE_US, DECODE_US))
    cluster = Cluster("the authors'", nodes, 1, Link(100, 10), Link(SEND_GBPS, SEND_US))
    return Problem(Profile("one tensor", (TensorProfile("t", FC6_NUMEL, 0.0),)), cluster, CodecCosts("tbq", TBQ_BYTES, {"gpu": curve}))


def _first_compressed(nodes: int) -> float:
    problem = _authors_problem(nodes)
    return float(next(4 << bits for bits in range(40) if secopa(problem, 1 << bits, problem.codec).compressed))


def _fc6_ms(nodes: int, *, compressed: bool) -> float:
    problem = _authors_problem(nodes, encodes=compressed)
    found = secopa(problem, FC6_NUMEL, problem.codec)
    assert found.compressed == compressed
    return found.us / 1e3


def _out_of_order(job: Job) -> float:
    """The number of uncompressed tensors that are larger than a compressed one."""
    plan = hipress(problem_of(job)).buckets
    least = min((bucket.numel for bucket in plan if not is_uncompressed(bucket.option)), default=float("inf"))
    return float(sum(bucket.numel > least for bucket in plan if is_uncompressed(bucket.option)))


def _selective_gain(job: Job) -> float:
    """How much more the plan trains than one that compresses every tensor in as many partitions as there are nodes."""
    problem = problem_of(job)
    every = tuple(
        with_option(bucket, GPU_OVER_NODES, problem, min(bucket.numel, problem.cluster.nodes)) for bucket in tensor_by_tensor(problem)
    )
    return iteration_us(job, simulate(problem, every).step_us) / iteration_us(job, hipress(problem).step_us) - 1


def _batch_gain(job: Job) -> float:
    """How much more the plan trains if small uncompressed tensors that are ready one after the other travel together."""
    problem = problem_of(job)
    apart = tuple(bucket for bucket in hipress(problem).buckets)
    batched: list[PlannedBucket] = []
    for bucket in apart:
        small = is_uncompressed(bucket.option) and bucket.numel <= SMALL_NUMEL
        last = batched[-1] if batched else None
        if small and last is not None and is_uncompressed(last.option) and last.numel + bucket.numel <= BATCH_NUMEL:
            batched[-1] = replace(last, tensors=last.tensors + bucket.tensors, numel=last.numel + bucket.numel)
        else:
            batched.append(bucket)
    together = tuple(with_option(bucket, bucket.option, problem) for bucket in batched)
    return iteration_us(job, simulate(problem, apart).step_us) / iteration_us(job, simulate(problem, together).step_us) - 1


def _over_byteps_onebit(model: str) -> float:
    """What HiPress gains over compression on BytePS's CPUs, both with onebit, on 16 nodes of 8 V100 and 100 Gbit/s."""
    job = replace(next(job for job in JOBS if job.model == model), bed="espresso-nvlink", codec="efsignsgd")
    problem = problem_of(job, nodes=16)
    return iteration_us(job, byteps_compress(problem).step_us) / iteration_us(job, hipress(problem).step_us) - 1


def _moved(operations: tuple[tuple[str, float], ...], nodes: int) -> float:
    """Bytes through a node's link over a payload's. operations: each with the share of the payload that a rank holds."""
    return sum(volume_and_messages(name, nodes, RINGS)[0] * share for name, share in operations)


def _servers_over_ring(nodes: int) -> float:
    servers = _moved((("all_to_all", 1.0), ("all_gather", 1.0 / nodes)), nodes)
    return servers / _moved((("all_reduce", 1.0),), nodes)


def experiments() -> Iterator[Experiment]:
    authors = f"the artifact's constants: {SEND_GBPS / 8:g} GB/s and about {SEND_US:g} us a message, encoding at {ENCODE_GB_PER_S:g} GB/s, TBQ (1/16)"
    yield Experiment(
        "Selective compression: the size from which SeCoPa compresses",
        ARTIFACT,
        authors,
        "SeCoPa's formulas, ours",
        0.0,
        [Claim(f"{nodes} nodes", size, functools.partial(_first_compressed, nodes), "bytes") for nodes, size in FIRST_COMPRESSED.items()],
        f"{FLAT}, so there only larger tensors have anything to save",
    )
    yield Experiment(
        "SeCoPa's times of VGG-19's largest tensor",
        ARTIFACT,
        authors,
        "SeCoPa's formulas, ours",
        0.10,
        [
            Claim(
                f"{nodes} nodes, {'compressed' if which else 'uncompressed'}",
                FC6_MS[nodes][which],
                functools.partial(_fc6_ms, nodes, compressed=bool(which)),
                "ms",
            )
            for nodes in FC6_MS
            for which in (0, 1)
        ],
        f"{FLAT}; what decoding costs there is not known to us",
    )
    yield Experiment(
        "Selective compression by size, on Espresso's jobs",
        f"{PAPER}, section 3.3",
        "8 nodes of 8 V100, nominal rates",
        "simulator",
        1e-3,
        [
            *(
                Claim(
                    f"{job.name}: uncompressed tensors that are larger than a compressed one",
                    0,
                    functools.partial(_out_of_order, job),
                    "count",
                )
                for job in JOBS
            ),
            *(
                Claim(f"{job.name}: gain over compressing every tensor", 0.0, functools.partial(_selective_gain, job), "gain", "at least")
                for job in JOBS
            ),
        ],
    )
    yield Experiment(
        "CaSync: servers on the nodes move what a ring moves",
        f"{PAPER}, section 3.1",
        "bytes through a node's link",
        "counted",
        1e-9,
        [Claim(f"{nodes} nodes", 1.0, functools.partial(_servers_over_ring, nodes), "times") for nodes in (4, 8, 16)],
    )
    yield Experiment(
        "Batches of small gradients",
        f"{PAPER}, section 3.2 (only the sign is claimed here)",
        "as above; uncompressed tensors of at most 65,536 elements travel together, up to 262,144",
        "simulator",
        1e-3,
        [Claim(job.name, 0.0, functools.partial(_batch_gain, job), "gain", "at least") for job in JOBS],
        "a batch waits for its last gradient, and here messages of small tensors hide behind backward",
    )
    yield Experiment(
        "The headline: over compression on BytePS's CPUs",
        f"{PAPER}, abstract: 17.2 % to 69.5 % over the best of BytePS and Ring with compression, six models",
        "16 nodes of 8 V100, NVLink, 100 Gbit/s, onebit; the models of ours that are among the paper's",
        "simulator",
        0.0,
        [
            Claim(f"{model}: at least the least", HEADLINE[0], functools.partial(_over_byteps_onebit, model), "gain", "at least")
            for model in ("vgg16", "ugatit", "bert-base", "lstm")
        ],
        "links have their nominal rate here, and BytePS's compression has the whole host's CPU to itself, so little is left to gain where backward hides it",
    )
    yield Experiment(
        "CompLL's programs in psgc's kit",
        f"{PAPER}, table 5: lines of logic and of functions",
        "psgc/reproduce/compll.py: compress, expand, parameters and payload",
        "counted",
        0.0,
        [
            Claim(program.__name__, sum(LINES[program.__name__]), functools.partial(lines_of, program), "lines", "at most")
            for program in PROGRAMS
        ],
    )
    yield Experiment(
        "CompLL's kernels",
        f"{PAPER}, section 6",
        "V100",
        "-",
        0.0,
        [
            Claim(
                "TBQ: over 12 x the open implementation's (38.2 ms for 256 MB)",
                12,
                None,
                "times",
                "at least",
                reason="needs a GPU and that implementation; psgc's own kernels on an H200 are in docs/results/nvidia-h200.json",
            ),
            Claim(
                "onebit: 35.6 x BytePS's on the CPU", 35.6, None, "times", "at least", reason="needs a V100 and its host beside each other"
            ),
        ],
    )
