"""A planning job from the user's arguments: profile, cluster, codec and constraints become one problem, with notes on what was assumed.

Owns the defaults: which GPU, which codec, and which codec times. The modules of ``inputs`` know the files' formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, load_cluster
from psgc.plan.inputs.estimates import ASSUMED_GPU, Measured, located, with_carriers, with_codec_times, with_cpu_estimates
from psgc.plan.inputs.profile import PUBLISHED_BYTES, Profile, load_profile
from psgc.plan.model.constraints import ALL
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import Constraints, encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, is_of_a_node
from psgc.plan.model.quality import LENIENTLY, Standard

# The GPU that a well-known model's times are computed for if the user names none.
DEFAULT_GPU: Final = ASSUMED_GPU
# If the user chooses no codec, a plan takes the first of these that is sound under the optimizer and has times: codecs with the smallest error
# first, then those that need error feedback, and last those that exist only as published times of the V100.
PREFERRED: Final = ("int8", "bf16", "fp16", "int4", "onebit", "topk", "randomk", "efsignsgd", "dgc")


Choose = Callable[[Profile, Cluster], tuple[str, str]]


class Job(NamedTuple):
    """A problem, and notes on what was assumed, one line each. estimated: the codecs whose times are estimates."""

    problem: Problem
    notes: tuple[str, ...]
    estimated: frozenset[str] = frozenset()


def load_job(
    profile_text: str, cluster: str | Cluster, codec: str | None = None, constraints: Constraints = ALL, *,
    measured: Measured | None, gpu: str | None = None, beside: Iterable[str] = (), standard: Standard = LENIENTLY, choose: Choose | None = None,
) -> Job:  # fmt: skip
    """The job that these files or names describe. Raises UsageError or CodecError, which name the argument and what is wrong with it.

    measured: adds codec times measured on a GPU to a profile without them, and says where they come from. Without a default, so that no verb prices a job
    otherwise than another because it was left out.
    gpu: the GPU for which a well-known model's times are computed, and for which missing codec times are estimated.
    beside: further codecs, those of a given plan's buckets.
    standard: that a codec which is chosen by default meets.
    choose: the codec for a profile and a cluster where none is named and nothing is ruled out, "" for none, and a note that says why."""
    profile, device = located(load_profile(profile_text, gpu or DEFAULT_GPU), gpu)
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    notes = [] if Path(profile_text).is_file() else [_computed_note(profile, gpu)]
    notes += [device] if device else []
    if _all_match(profile, constraints) and codec is None:  # every tensor has its own codec, so the default is never used
        codec = next((name for _, name in constraints.codecs if name != UNCOMPRESSED), UNCOMPRESSED)
    constraints = replace(constraints, on_gpus=constraints.runtime and profile.device == "cuda" and "gpu" in constraints.devices)
    named = {*(name for _, name in constraints.codecs), *beside}
    if codec is None and not constraints.codecs and not _suitable(standard=standard):
        codec = UNCOMPRESSED
        notes.append(f"no codec, since each {standard.told(PREFERRED[0])}; --codec names one")
    if not may_encode(constraints) or {codec, *named} == {UNCOMPRESSED}:
        profile, _ = with_cpu_estimates(profile, (UNCOMPRESSED,))  # copies into slots and out of them, and servers' sums
        profile, fixed = with_carriers(profile)
        profile = profile.corrected
        notes += fixed
        return _job(Problem(profile, cluster, codec_costs(UNCOMPRESSED, profile), constraints), notes)
    wanted = named | _candidates(codec, profile, standard=standard)
    timed = with_codec_times(profile, wanted or profile.codecs, gpu=gpu or "", measured=measured)
    if codec is None and choose is not None and constraints == replace(ALL, runtime=constraints.runtime, on_gpus=constraints.on_gpus):
        codec, said = choose(profile, cluster)
        notes += [said] if codec else []
    if not codec:
        codec = default_codec(timed.profile, _devices(profile, constraints), standard=standard)
        notes.append(_default_note(codec, timed.profile, standard=standard))
    used = {*named, codec}
    timed = with_codec_times(profile, used, gpu=gpu or "", measured=measured)
    profile = timed.profile
    notes += timed.notes
    estimated = frozenset(name for name in used if timed.times(name) == "estimated")
    costs = _costs(codec, profile, cluster, constraints)
    others = tuple((pattern, _costs(name, profile, cluster, constraints)) for pattern, name in constraints.codecs)
    if cluster.has_threads and any(is_of_a_node(each) for each in (costs, *(each for _, each in others))):
        cluster = replace(cluster, cores=0, codec_threads=0)
        notes.append("a node's CPU encodes one part at a time, since the published codec times of V100's host are of its whole CPU")
    return _job(Problem(profile, cluster, costs, constraints, others), notes, estimated)


def problem_of_profile(
    profile: Profile, cluster: Cluster, codec: str, beside: Iterable[str] = (), *, measured: Measured | None, gpu: str | None = None
) -> Problem:  # fmt: skip
    """The problem that a simulation of a plan poses: ``load_job`` of a profile that is loaded. codec: the plan's; beside: those of its other buckets;
    measured, gpu: as of ``load_job``."""
    profile, _ = located(profile, gpu)
    timed = with_codec_times(profile, {codec, *beside}, gpu=gpu or "", measured=measured).profile
    return Problem(timed, cluster, _costs(codec, timed, cluster, ALL))


def _job(problem: Problem, notes: Sequence[str], estimated: frozenset[str] = frozenset()) -> Job:
    """With a note where the cluster does not say what runs collectives."""
    if problem.named is not problem.cluster:
        notes = [
            *notes,
            f"collectives between GPUs pass hosts' memory, at {problem.named.intra.gbps:g} Gbit/s within a node at most, as in jobs where nothing else is "
            'named; collectives = "nccl" in the cluster\'s file (PSGC_COLLECTIVES=nccl) if they will go from GPU to GPU',
        ]
    return Job(problem, tuple(notes), estimated)


def _devices(profile: Profile, constraints: Constraints) -> tuple[str, ...]:
    """The devices that the constraints allow and that the model's gradients can be encoded on."""
    return tuple(device for device in constraints.encoders if device == "cpu" or profile.device != "cpu")


def may_encode(constraints: Constraints) -> bool:
    """Whether the constraints leave any encoding at all."""
    return bool(constraints.encoders) and constraints.most_encodes != 0


def _computed_note(profile: Profile, gpu: str | None) -> str:
    published = ", with the published codec times of V100 and its host" if profile.codecs else ""
    another = "" if gpu else "; --gpu chooses another"
    return f"profile {profile.model}: computed for {profile.hardware}: {profile.source.removeprefix('computed: ')}{published}{another}"


def _all_match(profile: Profile, constraints: Constraints) -> bool:
    """Whether the constraints give every tensor a codec. Raises UsageError for a pattern that matches no tensor."""
    names, matched = {tensor.name for tensor in profile.tensors}, set[str]()
    for pattern, _ in constraints.codecs:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            few = ", ".join(tensor.name for tensor in profile.tensors[:3])
            raise UsageError(f"constraints: codecs: {pattern!r} is the name of no tensor of {profile.model}; its tensors are {few}, ...")
        matched |= found
    return matched == names


def _candidates(codec: str | None, profile: Profile, *, standard: Standard) -> frozenset[str]:
    """The codecs whose times are needed beyond the profile's: the chosen one; or none, if no codec is chosen and the profile has times of a
    suitable one; or else all suitable ones."""
    if codec is not None:
        return frozenset({codec})
    suitable = _suitable(standard=standard)
    return frozenset() if any(name in profile.codecs for name in suitable) else frozenset(suitable)


def _suitable(*, standard: Standard) -> list[str]:
    """The preferred codecs that may be the default."""
    return [name for name in PREFERRED if standard.keeps(name)]


def _default_note(codec: str, profile: Profile, *, standard: Standard) -> str:
    if codec == UNCOMPRESSED:
        known = sorted(profile.codecs.keys() - {UNCOMPRESSED})
        unfit = standard.told_of(name for name in known if name in PREFERRED and not standard.keeps(name))
        return "; ".join((f"no codec: there are times of {', '.join(known)} only", *unfit, "or name one with --codec"))
    return f"codec {codec}, since none was chosen: the first that is timed, of {', '.join(_suitable(standard=standard))}"


def _costs(codec: str, profile: Profile, cluster: Cluster, constraints: Constraints) -> CodecCosts:
    """The codec's costs. Raises UsageError if no plan could encode with it."""
    if constraints.runtime and codec != UNCOMPRESSED:
        _check_runs(codec)
    costs = codec_costs(codec, profile, cluster.gpus)
    if codec == UNCOMPRESSED:
        return costs
    devices = _devices(profile, constraints)
    if not devices:
        raise UsageError(
            f"codec {codec}: the constraints leave GPUs alone to encode on, but this model's gradients lie in hosts' memory; allow \"cpu\""
        )
    if not any(costs.knows(device) for device in devices):
        raise UsageError(f"codec {codec}: the profile has no times for it on {' or '.join(devices)}; measure them with psgc profile")
    return costs


def _check_runs(codec: str) -> None:
    """Raise UsageError for a codec that no job can use with a plan's buckets."""
    if codec in PUBLISHED_BYTES:
        raise UsageError(f"codec {codec}: known by its published times alone, so no job can use it; choose one of psgc codecs")
    from psgc.codecs.registry import parse_scheme

    if parse_scheme(codec).whole:
        raise UsageError(f"codec {codec}: it does not cut tensors, and a plan that can be run may cut any; choose another of psgc codecs")


def default_codec(profile: Profile, devices: Sequence[str], *, standard: Standard = LENIENTLY) -> str:
    """The codec to plan with if the user chooses none; ``none`` if no codec with times meets the standard. Raises
    UsageError if the profile has no codec's times on these devices."""
    timed = [name for name in PREFERRED if any(device in profile.codecs.get(name, {}) for device in devices)]
    if not timed:
        raise UsageError(
            f"profile: times of no codec on {' or '.join(devices)}; choose one with --codec, or measure them with psgc profile"
        )
    return next((name for name in timed if name in _suitable(standard=standard)), UNCOMPRESSED)


def codec_of(buckets: Iterable[PlannedBucket]) -> str:
    """The codec of the first encoded bucket, ``none`` if no bucket is encoded. A simulation takes it as the problem's codec."""
    return next((bucket.codec for bucket in buckets if encodes(bucket.option)), UNCOMPRESSED)


def recoded(buckets: Iterable[PlannedBucket], codec: str) -> tuple[PlannedBucket, ...]:
    """The buckets with another codec wherever they are encoded."""
    return tuple(replace(bucket, codec=codec) if encodes(bucket.option) else bucket for bucket in buckets)
