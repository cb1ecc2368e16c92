"""Compares two ranks' declarations, and names their first difference."""

from __future__ import annotations

from typing import Any

from psgc.errors import LayoutMismatch
from psgc.layout.records import BucketSpec, Declaration


def compare(first: Declaration, rank_first: int, other: Declaration, rank_other: int) -> None:
    """Raise LayoutMismatch, naming the first tensor and the ranks that differ, unless the two declarations agree."""

    def differ(what: str, a: object, b: object) -> LayoutMismatch:
        return LayoutMismatch(
            f"{what} on rank {rank_first} is {a}, on rank {rank_other} it is {b} (declared as {first.name}); every rank must declare the same"
        )

    for a, b in zip(first.tensors, other.tensors, strict=False):
        if a.name != b.name:
            raise differ("the next tensor", repr(a.name), repr(b.name))
        for attribute in ("shape", "dtype", "group"):
            if getattr(a, attribute) != getattr(b, attribute):
                raise differ(f"{attribute} of tensor {a.name!r}", getattr(a, attribute), getattr(b, attribute))
    if len(first.tensors) != len(other.tensors):
        longer, rank = (first, rank_first) if len(first.tensors) > len(other.tensors) else (other, rank_other)
        extra = longer.tensors[min(len(first.tensors), len(other.tensors))].name
        lacking = rank_other if rank == rank_first else rank_first
        raise LayoutMismatch(
            f"tensor {extra!r} is on rank {rank} but not on rank {lacking} (declared as {first.name}); build the same model everywhere"
        )
    for attribute in (
        "kind",
        "codec",
        "mean",
        "root",
        "part_bytes",
        "fuse_bytes",
        "min_compress_bytes",
        "seed",
        "stream",
        "past_steps",
        "turn",
        "awaited_singly",
        "members",
    ):
        if getattr(first, attribute) != getattr(other, attribute):
            raise differ("root_rank" if attribute == "root" else attribute, getattr(first, attribute), getattr(other, attribute))
    if first.hashed != other.hashed:
        raise differ("the hash function that places parts (BYTEPS_KEY_HASH_FN)", first.hashed or "not set", other.hashed or "not set")
    if first.rule != other.rule:
        raise differ("the update rule, or its bound on staleness (PSGC_STALENESS),", first.rule, other.rule)
    if first.buckets != other.buckets:
        raise differ(*_planned_apart(first, other))


def _planned_apart(first: Declaration, other: Declaration) -> tuple[str, str, str]:
    """The first difference between two ranks' plans: what differs, and its value in each."""
    for number, (a, b) in enumerate(zip(first.buckets, other.buckets, strict=False)):
        bucket = f"of the plan's bucket {number} (of {first.tensors[a.tensors[0]].name!r})"
        if a.tensors != b.tensors:
            mine, others = ([first.tensors[i].name for i in spec.tensors] for spec in (a, b))
            return f"tensors {bucket}", f"{mine!s:.80}", f"{others!s:.80}"
        for attribute in ("codec", "priority", "parts", "part_numel", "servers", "option", "turns", "device", "members"):
            if getattr(a, attribute) != getattr(b, attribute):
                return f"{attribute} {bucket}", _shown(attribute, a), _shown(attribute, b)
    return "the number of the plan's buckets", str(len(first.buckets)), str(len(other.buckets))


def _shown(attribute: str, spec: BucketSpec) -> Any:
    """A bucket's attribute for people."""
    if attribute == "members":
        return f"ranks {list(spec.members)}" if spec.members else "all ranks"
    return getattr(spec, attribute) or ("cpu" if attribute == "device" else getattr(spec, attribute))
