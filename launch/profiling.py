"""What ``psgc profile`` measures: a model's tensors, codecs on this CPU, messages on this machine; put together to one profile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Final

from psgc.errors import UsageError
from psgc.machine import machine
from psgc.plan.cluster import Cluster, Link
from psgc.plan.observed import LEAST_ITERATIONS
from psgc.plan.profile import CostCurve, Profile, computed_profile

LOOPBACK: Final = "loopback"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured. transport: of links, None if they are not. inter: the link between nodes, if it is given."""

    model: str | None
    gpu: str
    command: tuple[str, ...]
    workers: int
    servers: int
    iterations: int
    codecs: tuple[str, ...]
    transport: str | None
    inter: Link | None

    def __post_init__(self) -> None:
        if self.command and self.model is not None:
            raise UsageError("profile: --model is computed, --script measured; give one of them")
        if not self.command and self.model is None and self.transport is None:
            raise UsageError("profile: nothing to measure; give --model NAME, --script -- CMD... or --links")
        if self.command and shutil.which(self.command[0]) is None:
            raise UsageError(f"profile: command {self.command[0]!r} is not found or not executable")
        if min(self.workers, self.servers) < 1 or self.iterations < LEAST_ITERATIONS:
            raise UsageError(
                f"profile: --workers {self.workers} --servers {self.servers} --iterations {self.iterations}: "
                f"expected at least 1, 1 and {LEAST_ITERATIONS}"
            )
        if self.transport not in (None, "auto", "tcp", "shm"):
            raise UsageError(f"profile: --transport {self.transport}: expected auto, tcp or shm")


def measure(request: Request, bar: bool) -> Profile:
    """All that was asked for. bar: show progress on a terminal. Raises JobFailed, PsgcError for a wrong kernel, UsageError for an unknown model."""
    found = _tensors(request)
    measured = _curves(request.codecs, bar)
    codecs = {name: {**found.codecs.get(name, {}), **measured.get(name, {})} for name in {**found.codecs, **measured}}
    if measured and request.model is not None:
        found = replace(found, source=f"{found.source}; codecs on the CPU measured on {machine()}", date=_now())
    found = replace(found, codecs=codecs)
    if request.transport is None:
        return found
    from psgc.launch.profile_links import fit, measure_link

    none = measured["none"] if "none" in measured else _curves(("none",), bar)["none"]
    link, overheads = fit(measure_link(request.transport), none)
    return replace(found, links={LOOPBACK: link}, overheads=overheads)


def _tensors(request: Request) -> Profile:
    """The profile without what this process measures."""
    if request.model is not None:
        return computed_profile(request.model, request.gpu)
    if request.command:
        from psgc.launch.profile_job import profile_job

        return profile_job(request.command, request.workers, request.servers, request.iterations)
    return Profile("", (), machine(), _now(), "measured")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _curves(codecs: Sequence[str], bar: bool) -> dict[str, dict[str, CostCurve]]:
    if not codecs:
        return {}
    from psgc.launch.profile_curves import SIZES, measure_curves

    with _progress_bar(len(codecs) * len(SIZES), bar) as advance:
        return measure_curves(codecs, progress=advance)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """On a terminal's stderr; says what is being done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def cluster_of(request: Request, found: Profile) -> Cluster:
    """One worker a node, as the job on this machine has them. Between nodes the given link, else the measured one."""
    inter = request.inter or found.links[LOOPBACK]
    within = found.links.get(LOOPBACK, inter)  # with one worker a node nothing travels there
    source = f"psgc profile on {found.hardware}" if request.inter is None else "links as given to psgc profile"
    return Cluster("profiled", request.workers, 1, within, inter, request.servers, source=source)
