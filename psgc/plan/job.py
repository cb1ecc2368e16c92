"""A planning job from what a user names: profile, cluster, codec and constraints become one problem, and notes on what was assumed.

Owns what holds where the user says nothing: which codec, and which codec times. Files' shapes are their own modules' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.cluster import Cluster, load_cluster
from psgc.plan.constraints import ALL
from psgc.plan.costs import CodecCosts
from psgc.plan.options import Constraints, encodes
from psgc.plan.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.problem import PUBLISHED_BYTES, Problem, codec_costs
from psgc.plan.profile import V100_CODECS, Profile, load_profile

# The codec of a plan for which none is chosen is the first of these that the profile has times for: those that train as without them under
# every optimiser first, then those that need error feedback, and what only the published times of V100 know last.
PREFERRED: Final = ("int8", "bf16", "fp16", "int4", "onebit", "topk", "randomk", "efsignsgd", "dgc")


class Job(NamedTuple):
    """A problem, and what was assumed in posing it, a line each."""

    problem: Problem
    notes: tuple[str, ...]


def load_job(profile_text: str, cluster_text: str, codec: str | None = None, constraints: Constraints = ALL) -> Job:
    """The job of these files or names. Raises UsageError or CodecError saying what is wrong with which."""
    profile, notes = _with_codec_times(load_profile(profile_text))
    cluster = load_cluster(cluster_text)
    if not constraints.encoders:
        return Job(Problem(profile, cluster, codec_costs(UNCOMPRESSED, profile), constraints), tuple(notes))
    if codec is None:
        codec = default_codec(profile, constraints.encoders)
        notes.append(f"codec {codec}, since none was chosen: the first that the profile has times for of {', '.join(PREFERRED)}")
    costs = _costs(codec, profile, cluster, constraints)
    others = tuple((pattern, _costs(name, profile, cluster, constraints)) for pattern, name in constraints.codecs)
    for pattern, _ in others:
        if not any(fnmatchcase(tensor.name, pattern) for tensor in profile.tensors):
            few = ", ".join(tensor.name for tensor in profile.tensors[:3])
            raise UsageError(f"constraints: codecs: {pattern!r} is the name of no tensor of {profile.model}; its tensors are {few}, ...")
    return Job(Problem(profile, cluster, costs, constraints, others), tuple(notes))


def _costs(codec: str, profile: Profile, cluster: Cluster, constraints: Constraints) -> CodecCosts:
    """The codec's. Raises UsageError where no plan could encode with it."""
    costs = codec_costs(codec, profile, cluster.gpus)
    if codec == UNCOMPRESSED:
        return costs
    if constraints.runtime:
        _check_runs(codec)
    devices = constraints.encoders
    if not any(costs.knows(device) for device in devices):
        raise UsageError(f"codec {codec}: the profile has no times for it on {' or '.join(devices)}; measure them with psgc profile")
    return costs


def _check_runs(codec: str) -> None:
    """Raise UsageError for a codec that the bucketings of a plan cannot be run with."""
    if codec in PUBLISHED_BYTES:
        raise UsageError(f"codec {codec}: known by its published times alone, so no job can use it; choose one of psgc codecs")
    from psgc.codecs.scheme import parse_scheme

    if parse_scheme(codec).whole:
        raise UsageError(f"codec {codec}: it does not cut tensors, and a plan that can be run may cut any; choose another of psgc codecs")


def _with_codec_times(profile: Profile) -> tuple[Profile, list[str]]:
    if profile.codecs:
        return profile, []
    note = "codec times are the published ones of V100 and its host, since the profile has none"
    return replace(profile, codecs=V100_CODECS), [note]


def default_codec(profile: Profile, devices: Sequence[str]) -> str:
    """The codec to plan with if none is chosen. Raises UsageError if the profile has times of none on these devices."""
    for name in PREFERRED:
        if any(device in profile.codecs.get(name, {}) for device in devices):
            return name
    raise UsageError(f"profile: times of no codec on {' or '.join(devices)}; choose one with --codec, or measure them with psgc profile")


def codec_of(buckets: Iterable[PlannedBucket]) -> str:
    """The codec of the first of a plan's buckets that is encoded, ``none`` if none is: a simulation's, beside the others' own."""
    return next((bucket.codec for bucket in buckets if encodes(bucket.option)), UNCOMPRESSED)


def recoded(buckets: Iterable[PlannedBucket], codec: str) -> tuple[PlannedBucket, ...]:
    """The buckets with another codec wherever they are encoded."""
    return tuple(replace(bucket, codec=codec) if encodes(bucket.option) else bucket for bucket in buckets)
