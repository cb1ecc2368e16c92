"""Measures everything for ``psgc profile`` (a model's tensors, codecs on this CPU, messages on this machine) and makes one profile of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from psgc.diagnostics.compiling import TextObserver, observed_by
from psgc.diagnostics.machine import machine
from psgc.errors import ConfigError, UsageError
from psgc.launch.job.interpreter import check_command
from psgc.launch.profiling.links import SIZES as LINK_SIZES
from psgc.launch.profiling.links import Measured, fit, fit_group, measure_here, measure_joined
from psgc.launch.topology import Topology, as_detected
from psgc.launch.topology.describe import links_text
from psgc.plan.inputs.carriers import TCP
from psgc.plan.inputs.cluster import TCP_SHARE, Cluster, Link
from psgc.plan.inputs.observed import LEAST_ITERATIONS
from psgc.plan.inputs.profile import Curves, Profile, computed_profile
from psgc.processes.cores import usable_cores
from psgc.transport.registry import choices

CURVE_SIZES: Final = tuple(1 << power for power in range(12, 25, 2))  # elements: 16 KB to 64 MB of fp32
# Of one message, where only a link's kind is known: as the ready-made clusters have them (psgc/plan/inputs/cluster.py).
ASSUMED_NVLINK_US: Final = 8.0
ASSUMED_PCIE_US: Final = 10.0
LOOPBACK, BETWEEN_NODES = "loopback", "inter"


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure. transport: measure links over it; None: no links. join: measure links to the server
    of the job that the environment names, not to one started here. inter: the link between nodes, if given. trace: a training's trace file of
    another profiler; time_codecs: whether the usual codecs are timed here, quickly, if that training was on a CPU and ``codecs`` names none."""

    model: str | None
    gpu: str
    command: tuple[str, ...]
    workers: int
    servers: int
    iterations: int
    codecs: tuple[str, ...]
    transport: str | None
    join: bool
    inter: Link | None
    trace: Path | None = None
    time_codecs: bool = False

    def __post_init__(self) -> None:
        if self.command and self.model is not None:
            raise UsageError("profile: --model is computed, --script measured; give one of them")
        if self.trace is not None and (self.command or self.model is not None):
            raise UsageError("profile: --trace contains times of its own; give one of --trace, --model and --script")
        if not self.command and self.model is None and self.transport is None and self.trace is None:
            raise UsageError("profile: nothing to measure; give --model NAME, --script -- CMD..., --trace FILE or --links")
        if self.command:
            check_command("profile", self.command)
        if min(self.workers, self.servers) < 1 or self.iterations < LEAST_ITERATIONS:
            raise UsageError(
                f"profile: --workers {self.workers} --servers {self.servers} --iterations {self.iterations}: "
                f"expected at least 1, 1 and {LEAST_ITERATIONS}"
            )
        if self.join and self.transport is None:
            raise UsageError("profile: --join says where --links measures; give both")
        if self.transport is not None and self.transport not in choices():
            raise UsageError(f"profile: --transport {self.transport}: expected one of {', '.join(choices())}")


def measure(request: Request, bar: bool, keep: Callable[[Profile], None] = lambda found: None) -> Profile:
    """All that was asked for. bar: show progress on a terminal. keep: is given what a job has measured, which cost most, before anything else is measured.
    Raises JobFailed, PsgcError for a wrong kernel, UsageError for an unknown model."""
    found = _tensors(request)
    if request.command and (request.codecs or request.transport is not None):
        keep(found)
    trips = _trips(request, bar)
    measured = _curves(request.codecs, CURVE_SIZES, bar) or _beside_trace(request, found, bar)
    codecs = {name: {**found.codecs.get(name, {}), **measured.get(name, {})} for name in {**found.codecs, **measured}}
    if measured and (request.model is not None or request.trace is not None):
        found = replace(found, source=f"{found.source}; codecs on the CPU measured on {machine()}", date=_now())
    if trips is None:
        return replace(found, codecs=codecs)
    none = measured["none"] if "none" in measured else _curves(("none",), LINK_SIZES, bar)["none"]
    link, _ = fit(trips.link, none)
    links = {**found.links, BETWEEN_NODES if request.join else LOOPBACK: link}
    carriers = {name: fit(each, none)[1] for name, each in trips.served.items()}
    carriers |= {name: fit_group(each) for name, each in trips.groups.items()}
    return replace(found, codecs=codecs, links=links, carriers=carriers, spread={**found.spread, **trips.link.spread})


def _trips(request: Request, bar: bool) -> Measured | None:
    if request.transport is None:
        return None
    if request.join:
        return measure_joined(request.transport)
    return measure_here(request.transport, lambda text: _tell(f"measuring {text}, for some seconds", bar))


def _tensors(request: Request) -> Profile:
    """The profile without what this process measures."""
    if request.model is not None:
        return computed_profile(request.model, request.gpu)
    if request.command:
        from psgc.launch.profiling.job import profile_job

        return profile_job(request.command, request.workers, request.servers, request.iterations)
    if request.trace is not None:
        from psgc.plan.inputs.recorded import profile_of_file

        return profile_of_file(request.trace)
    return Profile("", (), machine(), _now(), "measured")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _tell(text: str, shown: bool) -> None:
    if shown:
        print(f"psgc profile: {text}", file=sys.stderr, flush=True)


def _curves(codecs: Sequence[str], sizes: Sequence[int], bar: bool) -> Curves:
    if not codecs:
        return {}
    from psgc.launch.profiling.curves import measure_curves

    count = len(codecs) * len(sizes)
    _tell(f"timing {', '.join(codecs)} on this CPU: {count} measurements, which take about half a second each", bar)
    with _progress_bar(count, bar) as advance:
        on_cpu = measure_curves(codecs, sizes, advance)
    on_gpu = _gpu_curves(codecs, sizes, bar)
    return {name: {**curves, **on_gpu.get(name, {})} for name, curves in on_cpu.items()}


def _beside_trace(request: Request, found: Profile, bar: bool) -> Curves:
    """Times of the usual codecs on this machine, for a trace of a training on a CPU, which has none; a few passes each, as running jobs time them."""
    if request.trace is None or not request.time_codecs or found.device != "cpu":
        return {}
    from psgc.launch.profiling.curves import DEFAULT_CODECS
    from psgc.torch.plans.calibrating import measured_curves

    codecs = (*DEFAULT_CODECS, "int4")
    _tell(f"timing {', '.join(codecs)} on this CPU, for the trace has no times of codecs (--no-codecs leaves them out)", bar)
    return measured_curves(codecs)


def _gpu_curves(codecs: Sequence[str], sizes: Sequence[int], bar: bool) -> Curves:
    """The codecs' times on the GPU, if torch sees one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from psgc.launch.bench.gpu_kernels import CudaStopwatch
    from psgc.launch.profiling.curves import measure_gpu_curves

    try:
        watch = CudaStopwatch()
    except ConfigError as error:  # kernels cannot run there: jobs encode on the CPU
        _tell(str(error), bar)
        return {}
    _tell(f"timing codecs on {watch.name}", bar)
    return measure_gpu_curves(codecs, sizes, watch, lambda text: None)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal, with the current activity."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        with observed_by(TextObserver(lambda text: progress.update(task, description=text))):
            yield lambda text: progress.update(task, advance=1, description=text)


def cluster_of(request: Request, found: Profile, topology: Topology) -> tuple[Cluster, dict[str, str]]:
    """The cluster, and by field a comment that says where its value is from. Between nodes what TCP carries of the given link, else the measured one. With a
    given link each node is such a machine as this, with its GPUs; without one the job's workers and servers share this machine, one worker a node."""
    measured = found.links.get(BETWEEN_NODES if request.join else LOOPBACK)  # not what a trace says of its own collectives
    given = request.inter is not None
    inter = replace(request.inter, gbps=float(f"{request.inter.gbps * TCP_SHARE:.4g}")) if request.inter else measured
    assert inter is not None, "a cluster needs a link"
    within = measured or inter  # with one worker a node nothing travels there
    source = "links as given to psgc profile" if given else f"psgc profile on {found.hardware}"
    cores = usable_cores()
    gpus = len(topology.gpus) if given else 0
    comments = {
        "inter": f"as given, less frames' headers: TCP carries {TCP_SHARE:.3f} of a link" if given else "measured",
        "cores": "detected" if given else "detected, shared by the workers and servers",
        "intra": "measured between processes of this machine"
        if measured
        else "assumed: as between nodes; with one worker a node nothing travels there",
    }
    host = None
    if gpus > 1 and topology.intra_gbps:
        within = Link(topology.intra_gbps, ASSUMED_NVLINK_US if topology.nvlinks_of_a_gpu else ASSUMED_PCIE_US, links_text(topology))
        comments["intra"] = f"gbps detected ({links_text(topology)}; its rate by data sheet), latency assumed"
    elif gpus > 1:
        comments["intra"] = "assumed: the links between this machine's GPUs are not known"
    if gpus and topology.host_gbps:
        host = Link(topology.host_gbps, ASSUMED_PCIE_US, "PCIe")
        comments["host"] = (
            f"gbps detected (PCIe {topology.gpus[0].generation} x{topology.gpus[0].lanes}, four fifths of its rate), latency assumed"
        )
    if gpus:
        comments["gpus_per_node"] = "detected"
    inside = as_detected(topology) if gpus else ((), 0)
    comments |= dict.fromkeys(("reduce_roots", "pcie_switch_size"), "detected")
    cluster = Cluster(
        "profiled", request.workers, max(gpus, 1), within, inter, request.servers, source=source, cores=cores, host=host, reduce_roots=inside[0],
        pcie_switch_size=inside[1], one_machine=not given, over_tcp=not given and request.transport == TCP,
    )  # fmt: skip
    return cluster, comments
