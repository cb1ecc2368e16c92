"""Estimated codec times on GPUs without measured ones: the bytes that a codec reads and writes, divided by the memory's bandwidth.

The model: a fused kernel is bound by memory and reaches 70 % of its bandwidth; launch and synchronisation cost 10 us. Every use is
labelled as an estimate, and a profile's measured times take precedence. Owns the bytes, and the bandwidths of GPUs' memory and links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from psgc.plan.inputs.carriers import MEMORY, SHM, SOCKETS, TCP, CarrierCosts
from psgc.plan.inputs.cluster import Cluster, read_cluster
from psgc.plan.inputs.profile import V100_CODECS, CostCurve, Profile
from psgc.processes.pool import MAX_THREADS

# GB/s of memory, from the makers' data sheets (A100: 80 GB, SXM; H100, H200: SXM)
MEMORY_GBPS: Final = {"v100": 900.0, "t4": 300.0, "a10g": 600.0, "a100": 2039.0, "h100": 3350.0, "h200": 4800.0}
EFFICIENCY: Final = 0.7
LAUNCH_US: Final = 10.0
# Gbit/s between a node's GPUs, one way: NVLink of SXM boards, PCIe of others and of unknown GPUs
INTRA_GBPS: Final = {"v100": 1200.0, "a100": 2400.0, "h100": 3600.0, "h200": 3600.0}
PCIE_GBPS: Final = 100.0
# Gbit/s between a GPU and its host, one way: what PCIe x16 of the board's generation achieves (3.0; 4.0; 5.0)
HOST_GBPS: Final = {"v100": 100.0, "t4": 100.0, "a10g": 200.0, "a100": 200.0, "h100": 400.0, "h200": 400.0}
HOST_LATENCY_US: Final = 10.0
INTRA_LATENCY_US: Final = 8.0
# the payload bytes per element that a codec writes, and whether it keeps a residual
_PAYLOADS: Final = {
    "bf16": (2.0, False), "fp16": (2.0, False), "int8": (1.016, True), "fp8": (1.016, True), "int4": (0.531, True), "tbq": (0.266, True),
    "onebit": (0.126, True), "topk": (0.053, True), "randomk": (0.04, True),
}  # fmt: skip
# Nanoseconds per element on one core to encode, to decode, and for a server to finish the sum: docs/codecs.md, 4 MB of fp32 on AMD EPYC.
_CPU_NS: Final = {
    "none": (0.172, 0.237, 0.987), "bf16": (0.203, 0.156, 0.684), "fp16": (0.147, 0.167, 0.589), "int8": (0.483, 0.598, 1.19),
    "onebit": (0.314, 0.556, 0.729), "topk": (0.864, 0.462, 1.23), "int4": (1.13, 1.15, 2.2), "fp8": (0.948, 0.855, 1.86),
    "randomk": (0.376, 0.589, 0.101), "tbq": (1.03, 0.849, 1.98), "powersgd": (2.1, 6.05, 0.0751),
}  # fmt: skip
LOW_RANK: Final = "powersgd"
CPU_CALL_US: Final = 10.0  # fixed time of a kernel's call
UNCOMPRESSED: Final = "none"
RELAY: Final = "relay"
ASSUMED_GPU: Final = "v100"  # where gradients lie on a GPU that nobody names
# What carriers cost where the profile does not say, and gradients lie in hosts' memory: over servers about as psgc profile --links measures them; collectives
# through hosts' memory, half of what each of 64 parts of 16 KiB added to the quickest of 55 steps (reduce_scatter, all_gather; two workers, AMD EPYC, 2 cores,
# 24 November 2026): 1.17 ms over TCP, as between nodes, 0.55 ms through shared memory, as within one.
DEFAULT_CARRIERS: Final = {
    TCP: CarrierCosts(100.0, 30.0), SHM: CarrierCosts(100.0, 30.0), SOCKETS: CarrierCosts(590.0, 590.0), MEMORY: CarrierCosts(280.0, 280.0),
}  # fmt: skip
_SELECTION_PASSES: Final = {"topk": 4}  # passes over gradient and residual that find the k-th largest magnitude, one byte of it in each
# Of powersgd (cuda/lowrank): bytes that are read and written an element by both rounds of encoding, and by the result with its residual; launches of a matrix.
_LOW_RANK_BYTES, _LOW_RANK_LAUNCHES = (54.0, 32.0), (12, 4)


def cluster_of(
    gpu: str, nodes: int, gpus_per_node: int, gbps: float, latency_us: float, servers: int = 0, intra_gbps: float | None = None,
    cores: int | None = None, host_gbps: float | None = None,
) -> Cluster:  # fmt: skip
    """A cluster with this link between nodes, and with the usual links within a node and to the host for GPUs of this kind. Raises UsageError, which
    names the field.

    gpu:   the board's name, or a text with it in front of the first comma, as a profile's hardware is. For an unknown GPU, copies to the host cost nothing
           unless ``host_gbps`` is given. A board whose name has the word PCIe has no NVLink.
           Collectives between known GPUs are NCCL's, as in DistributedDataParallel and in jobs of psgc.
    cores: cores of a node; if left out, as many as its workers start threads for."""
    board = _board(gpu)
    nvlink_gbps = None if "pcie" in _words(gpu) else INTRA_GBPS.get(board)
    within = intra_gbps if intra_gbps is not None else nvlink_gbps if nvlink_gbps is not None else PCIE_GBPS
    host = HOST_GBPS.get(board) if host_gbps is None else host_gbps
    document = {
        "nodes": nodes, "gpus_per_node": gpus_per_node, "servers": servers, "intra": {"gbps": within, "latency_us": INTRA_LATENCY_US},
        "inter": {"gbps": gbps, "latency_us": latency_us}, "cores": MAX_THREADS * max(1, gpus_per_node) if cores is None else cores,
        **({} if host is None else {"host": {"gbps": host, "latency_us": HOST_LATENCY_US}}),
        **({"collectives": "nccl"} if board else {}),
        "source": f"{nodes} x {gpus_per_node} GPUs, {gbps:g} Gbit/s a node and {latency_us:g} us, {within:g} Gbit/s within one",
    }  # fmt: skip
    return read_cluster(document, f"{nodes}x{gpus_per_node}-{gbps:g}g", "advise")


def through_hosts(cluster: Cluster) -> Cluster:
    """The cluster whose jobs move collectives through hosts' memory, as they do unless their settings say otherwise. What a node's ranks reach there is not
    known: no more than a GPU's link to its host, which is taken to be PCIe's where the cluster has none."""
    most = PCIE_GBPS if cluster.host is None else cluster.host.gbps
    return replace(cluster, collectives="host", intra=replace(cluster.intra, gbps=min(cluster.intra.gbps, most)))


def with_carriers(profile: Profile) -> tuple[Profile, list[str]]:
    """The profile of a job whose gradients lie in hosts' memory, with the default costs of carriers that it says nothing of; and a note that names them."""
    known = profile.all_carriers
    missing = {name: costs for name, costs in DEFAULT_CARRIERS.items() if name not in known} if profile.device == "cpu" else {}
    if not missing:
        return profile, []
    named = ", ".join(
        f"{name} {costs.lone_us:g} us" + (f" and {costs.each_us:g} for each further one" if costs.late_us else "")
        for name, costs in missing.items()
    )
    return replace(profile, carriers={**profile.carriers, **missing}), [
        f"what an operation of a part costs whatever its bytes is that of an AMD EPYC with 2 cores ({named}), since the profile has none; psgc profile --links "
        "measures it"
    ]


class Timed(NamedTuple):
    """A profile whose codec times are complete, as far as anything is known, with its correction. estimated: the codecs with estimated times on some device;
    on_cpus: those with estimated times on CPUs; notes: where times on GPUs come from, and what is estimated."""

    profile: Profile
    estimated: frozenset[str] = frozenset()
    on_cpus: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def times(self, codec: str) -> str:
        """Whether the codec's times are measured or estimated, in a word."""
        return "estimated" if {codec, *_halves(codec)} & self.estimated else "measured"


Measured = Callable[[Profile, str], tuple[Profile, str]]  # adds codec times measured on a GPU of this name, and says where they come from


def with_codec_times(
    profile: Profile, names: Iterable[str], *, gpu: str = "", memory_gbps: float | None = None, measured: Measured | None = None
) -> Timed:  # fmt: skip
    """The one source of codec times, for whatever is planned or advised: those of the profile, else what was measured on such a GPU, else estimates.

    A codec has times on GPUs where gradients lie there (or where the profile does not say that they lie elsewhere), and on CPUs.
    gpu: the board, if not the one that the profile's hardware names; memory_gbps: bandwidth of its memory, if not that of a known one."""
    wanted = dict.fromkeys(half for name in names for half in _halves(name))
    notes, on_gpus = [], frozenset[str]()
    if profile.device != "cpu":
        board = gpu or profile.hardware.partition(",")[0]
        if profile.device == "cuda" and not profile.codecs and memory_gbps is None and not _board(board):
            profile = replace(profile, codecs=V100_CODECS)
            notes.append("codec times are the published ones of V100 and its host, since the profile has none")
            board = board or ASSUMED_GPU  # also for codecs without published times
        own = sorted(name for name in wanted if _is_own(name, profile))
        notes += [f"codec times of {', '.join(own)} on the GPU are the profile's"] if own else []
        profile, source = (profile, "") if measured is None else measured(profile, board)
        profile, on_gpus, told = with_gpu_estimates(profile, board, wanted, memory_gbps)
        notes += [*([source] if source else []), *told]
    profile, on_cpus = with_cpu_estimates(profile, (UNCOMPRESSED, *wanted))
    profile, fixed = with_carriers(profile)
    on_cpus -= {UNCOMPRESSED}
    return Timed(profile.corrected, on_gpus | on_cpus, on_cpus, (*notes, *cpu_estimates_note(on_cpus), *fixed))


def _is_own(name: str, profile: Profile) -> bool:
    """Whether the profile has times of its own for the codec on a GPU, not the published ones of V100."""
    found = profile.curve(name, "gpu")
    return found is not None and found != V100_CODECS.get(name, {}).get("gpu")


def located(profile: Profile, gpu: str | None = None) -> tuple[Profile, str]:
    """The profile with the device of its gradients, and a note that says how it is known; "" if the profile itself says so. gpu: what the user names."""
    if profile.device:
        return profile, ""
    board = next((name for name in (gpu, profile.hardware) if name and _board(name)), "")
    devices = {device for curves in profile.codecs.values() for device in curves}
    if board or "gpu" in devices:
        why = f"{board} is one" if board else "the profile has codec times there"
        return replace(profile, device="cuda"), f"gradients are taken to lie on a GPU, since {why}"
    if "cpu" in devices or profile.source.startswith("measured"):
        why = "the profile has codec times on CPUs alone" if devices else "the profile was measured and names no GPU"
        return replace(profile, device="cpu"), f"gradients are taken to lie in hosts' memory, since {why}"
    return replace(profile, device="cuda"), "gradients are taken to lie on a GPU, since the profile does not say where"


def with_gpu_estimates(
    profile: Profile, gpu: str, names: Iterable[str], memory_gbps: float | None = None
) -> tuple[Profile, frozenset[str], list[str]]:  # fmt: skip
    """The profile, with estimated GPU times added for codecs without any, if a word of ``gpu`` names a known GPU or its memory's bandwidth is given; the names
    of these codecs; and notes that say so."""
    if memory_gbps is None:
        memory_gbps = MEMORY_GBPS.get(_board(gpu))
    wanted = dict.fromkeys(map(_bare, names)) if memory_gbps is not None else {}
    missing = [name for name in wanted if (name in _PAYLOADS or name == LOW_RANK) and "gpu" not in profile.codecs.get(name, {})]
    if memory_gbps is None or not missing:
        return profile, frozenset(), []
    curves = {name: {**profile.codecs.get(name, {}), "gpu": estimate(name, memory_gbps)} for name in missing}
    return replace(profile, codecs={**profile.codecs, **curves}), frozenset(missing), estimates_notes(missing, memory_gbps)


def with_cpu_estimates(profile: Profile, names: Iterable[str]) -> tuple[Profile, frozenset[str]]:
    """The profile, with estimated CPU times added for codecs without any, and the names of these codecs. The times are those of one core of an
    AMD EPYC. Nothing is estimated for an unknown codec."""
    known = profile.codecs
    missing = {
        _bare(name) for name in names if _bare(name) in _CPU_NS and "cpu" not in (known.get(name) or known.get(_bare(name), {}))
    }  # fmt: skip
    curves = {name: {**profile.codecs.get(name, {}), **_on_cpu(name)} for name in sorted(missing)}
    return replace(profile, codecs={**profile.codecs, **curves}), frozenset(missing)


def _on_cpu(name: str) -> dict[str, CostCurve]:
    """A server adds a payload in the time of a decode, and finishes the sum in the rest of its pass."""
    encode, decode, server = _CPU_NS[name]
    finish = max(server - decode, 0.0)
    return {"cpu": _line(encode, decode), "server": _line(finish, min(decode, server))}


def _line(encode_ns: float, decode_ns: float) -> CostCurve:
    sizes = (1.0, 2.0**30)
    return CostCurve(
        sizes, tuple(CPU_CALL_US + n * encode_ns / 1e3 for n in sizes), tuple(CPU_CALL_US + n * decode_ns / 1e3 for n in sizes)
    )


def estimates_notes(names: Collection[str], memory_gbps: float | None) -> list[str]:
    """A note that names the codecs with estimated times and the model's assumptions; no note if there are none."""
    if not names or memory_gbps is None:
        return []
    return [
        f"codec times of {', '.join(sorted(names))} are estimates: bytes moved at {EFFICIENCY:.0%} of the {memory_gbps:g} GB/s of the GPU's memory"
    ]


def cpu_estimates_note(names: Collection[str]) -> list[str]:
    """A note that names the codecs with estimated CPU times; no note if there are none."""
    if not names:
        return []
    return [
        f"codec times of {', '.join(sorted(names))} on CPUs are estimates: what one core of an AMD EPYC took (docs/codecs.md); psgc profile measures yours"
    ]


def estimate(name: str, memory_gbps: float) -> CostCurve:
    """The estimated times of encoding, with the update of the residual, and of decoding a payload and adding it."""
    if name == LOW_RANK:
        return _estimated(_LOW_RANK_BYTES, _LOW_RANK_LAUNCHES, memory_gbps)
    payload, feedback = _PAYLOADS[name]
    selection = _SELECTION_PASSES.get(name, 0)
    # The gradient is read and the payload written. With feedback the residual is read too, and a second pass, when the result has come,
    # reads gradient, residual and payload and writes the residual.
    encode = (8 + payload) + (12 + payload) if feedback else 4 + payload
    encode += 8 * selection
    decode = payload + 8  # the sum is read and written
    return _estimated((encode, decode), ((2 if feedback else 1) + selection, 1), memory_gbps)


def _estimated(moved: tuple[float, float], launches: tuple[int, int], memory_gbps: float) -> CostCurve:
    """The curve of an encode and a decode that move so many bytes an element in so many launches."""
    us_per_byte, sizes = 1 / (memory_gbps * 1e3 * EFFICIENCY), (1.0, 2.0**30)
    encode, decode = (
        tuple(LAUNCH_US * count + n * bytes_ * us_per_byte for n in sizes) for bytes_, count in zip(moved, launches, strict=True)
    )
    return CostCurve(sizes, encode, decode)


def is_known_gpu(name: str) -> bool:
    """Whether codec times can be estimated for the GPU of this name."""
    return bool(_board(name))


def _board(name: str) -> str:
    """The known GPU that a word of the name names; "" if none does. What is behind a comma is the host's name."""
    return next((word for word in _words(name) if word in MEMORY_GBPS), "")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.partition(",")[0].lower())


def _halves(name: str) -> list[str]:
    """The codecs of a pair, or the one, without parameters, that have times: not ``none``, and not ``relay``, by which nothing is encoded."""
    return list(dict.fromkeys(bare for half in name.split("/") if (bare := _bare(half)) not in (UNCOMPRESSED, RELAY)))


def _bare(name: str) -> str:
    return name.partition("/")[0].partition(":")[0]
