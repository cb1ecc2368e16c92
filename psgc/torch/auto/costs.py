"""What codecs, copies and collectives cost in this job: rank 0's figures, by which it predicts. Each is measured once, when it is asked for first.

GPUs measure themselves, beside the first steps, which do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from psgc.errors import CodecError
from psgc.layout import build_layout
from psgc.plan.inputs.estimates import with_gpu_estimates
from psgc.plan.inputs.profile import Profile
from psgc.plan.live.outlook import Machines
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.planfile.runtime import plan_of
from psgc.program.backends import Backend, Facts, backend_of
from psgc.torch.auto.measuring import Measuring
from psgc.torch.collectives.device_group import facts_of
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.profiler import hardware_of
from psgc.torch.plans.device_times import DeviceTimes


class Costs:
    """sample: any of the parameters. within_gbps: of a node's memory; 0 until it has been measured. told: how times of codecs on GPUs are known, in words."""

    def __init__(self, exchange: GradientExchange[Any], measuring: Measuring, sample: torch.Tensor) -> None:
        self._exchange, self._measuring, self._sample = exchange, measuring, sample
        self._gpu: DeviceTimes | None = None
        self._curves: dict[str, Any] = {}
        self._backend: Backend | None = None  # what collectives of gradients on GPUs go through, once rank 0 has asked
        self.within_gbps = 0.0
        self.told = ""

    def time_gpu(self, codecs: Sequence[str]) -> None:
        """Where gradients lie on a GPU: have it measure itself."""
        engine = engine_of(self._sample) if self._exchange.session.rank == 0 else None
        if engine is not None:
            self._gpu = self._gpu or DeviceTimes(engine, codecs)
            self._gpu.enqueue()

    # what the job has, and would have

    @property
    def _on_gpu(self) -> bool:
        return self._gpu is not None and self._exchange.on_gpu

    def present_buckets(self) -> list[PlannedBucket]:
        """What gradients travel by now."""
        return [bucket for layout in self._exchange.layouts for bucket in plan_of(layout, on_gpu=self._on_gpu).buckets]

    def buckets_by(self, codec: str) -> tuple[PlannedBucket, ...] | None:
        """The buckets that the job would have by this codec; None where it does not carry some gradient's dtype."""
        session, declaration = self._exchange.session, self._exchange.proposed(codec)
        servers, used = session.config.servers, frozenset(declaration.used)
        try:
            layout = build_layout(declaration, layout_id=1, servers=servers, workers=session.size, used_by_all=used, ranks=session.ranks)
        except CodecError:
            return None
        return plan_of(layout, on_gpu=self._on_gpu).buckets

    # what it costs

    def measure(self, codecs: Sequence[str]) -> None:
        """What these cost on the CPU, those that have not been measured."""
        if unknown := [codec for codec in codecs if codec not in self._curves]:
            self._curves.update(self._measuring.curves(unknown))

    def completed(self, profile: Profile, codecs: Sequence[str]) -> Profile:
        """The profile with what has been measured. codecs: those of which times on GPUs are wanted, where gradients lie there."""
        found = replace(profile, codecs=self._curves)
        on_cores = replace(found, device="cpu", compute_threads=self._measuring.compute_threads())
        return on_cores if self._gpu is None else self._with_gpu(found, self._gpu, codecs)

    def _with_gpu(self, profile: Profile, gpu: DeviceTimes, codecs: Sequence[str]) -> Profile:
        """With what the GPU was measured to take; with estimates for what it has not come to, where its memory is known."""
        measured = gpu.curves()
        curves = {codec: {**profile.codecs[codec], **({"gpu": measured[codec]} if codec in measured else {})} for codec in codecs}
        board = hardware_of(self._sample).partition(",")[0] if self._sample.is_cuda else ""
        found, estimated, _ = with_gpu_estimates(replace(profile, codecs=curves, device="cuda"), board, codecs)
        told = [f"{', '.join(names)} {how}" for names, how in ((sorted(measured), "measured"), (sorted(estimated), "estimated")) if names]
        self.told = f"; codec times on the GPU: {', '.join(told) or 'not known'}"
        return found

    def machines(self) -> Machines:
        session = self._exchange.session
        sizes, config = session.ranks.node_sizes, session.config
        cores, gpu = self._measuring.cores(bool(config.launcher)), self._gpu
        here = config.root_host.startswith("127.") or config.root_host == "localhost"  # all members find the scheduler on this machine
        over_tcp = len(sizes) > 1 or bool(config.link_mbit) or config.transport == "tcp"  # groups of several nodes do
        machines = Machines(
            len(sizes), max(sizes), config.servers, cores, config.cpu_threads, len(set(sizes)) == 1,
            gpus=gpu is not None, host=None if gpu is None else gpu.host_link(), connected=gpu is not None and self._asked_backend().on_device,
            one_machine=here, over_tcp=over_tcp,
        )  # fmt: skip
        if max(sizes) > 1 and len(sizes) > 1:
            self.within_gbps = self.within_gbps or self._measuring.within_node_gbps(max(sizes), cores)
            machines = replace(machines, within_gbps=self.within_gbps)
        return machines

    # what collectives go through

    def tell_facts(self) -> None:
        """Tell rank 0, once, where this rank's gradients lie, by which it knows what collectives would go through."""
        session = self._exchange.session
        session.publish(self._facts_of(session.rank), facts_of(session, engine_of(self._sample)).encode())

    def _asked_backend(self) -> Backend:
        """What collectives of gradients on GPUs would go through. Raises ConfigError where a rank asks for what the job cannot have."""
        if self._backend is None:
            session = self._exchange.session
            known = {rank: bytes(session.lookup(self._facts_of(rank))) for rank in range(session.size)}
            self._backend = backend_of({rank: Facts.decode(facts) for rank, facts in known.items()})
        return self._backend

    def _facts_of(self, rank: int) -> str:
        return f"facts {rank} of {self._exchange.name}"

    def collectives(self) -> str:
        """What they go through, in words, where it has been asked."""
        if self._backend is None:
            return ""
        where = "from GPU to GPU" if self._backend.on_device else "through the hosts' memory"
        return f"; collectives go {where}: {self._backend.reason}"


def timed(profile: Profile, buckets: Sequence[PlannedBucket]) -> bool:
    """Whether the profile has times of all that the buckets have encoded on GPUs."""
    on_gpus = {bucket.codec for bucket in buckets if any(action.endswith("@gpu") for action in bucket.option)}
    return all("gpu" in profile.codecs.get(codec.partition(":")[0], profile.codecs.get(codec, {})) for codec in on_gpus)
