"""Chooses what runs the collectives of a group of ranks whose gradients lie on GPUs: NCCL, or the hosts' memory. Pure.

The choice follows from facts that every member has sent to the others, so it is the same on all of them. NCCL needs a separate GPU for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from psgc.errors import ConfigError

ASKED: Final = ("auto", "nccl", "host")  # PSGC_COLLECTIVES
REMEDY: Final = "or set PSGC_COLLECTIVES=host on every rank"


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank tells the others. host: its machine's id; gpu: the globally unique id of the GPU that its gradients lie on, "" for none; nccl: the
    version of NCCL in its torch, "" for none; asked: its PSGC_COLLECTIVES; encrypt: its PSGC_ENCRYPT."""

    host: str
    gpu: str
    nccl: str
    asked: str = "auto"
    encrypt: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Facts:
        """The inverse of ``encode``."""
        return cls(**json.loads(data))


class Backend(NamedTuple):
    """on_device: whether the members' GPUs exchange memory directly, through NCCL; reason: why, or why not, in words."""

    on_device: bool
    reason: str


def backend_of(members: Mapping[int, Facts]) -> Backend:
    """The backend of one group. members: each member's facts, by rank. Raises ConfigError, on every member, if one asks for NCCL and the group cannot
    use it."""
    wanting = [rank for rank, facts in members.items() if facts.asked == "nccl"]
    obstacle = _obstacle(members)
    if obstacle is None:
        versions = {facts.nccl for facts in members.values()}
        return Backend(True, f"{len(members)} ranks have a GPU each, and NCCL {versions.pop()}")
    if wanting:
        raise ConfigError(
            f"rank {min(wanting)} has PSGC_COLLECTIVES=nccl, but the group of ranks {_listed(members)} cannot have it: {obstacle}; "
            f"mend that, {REMEDY}"
        )
    return Backend(False, obstacle)


def _obstacle(members: Mapping[int, Facts]) -> str | None:
    """Why the group cannot use NCCL; None if it can."""
    for rank, facts in sorted(members.items()):
        if facts.asked == "host":
            return f"rank {rank} has PSGC_COLLECTIVES=host"
        if not facts.gpu:
            return f"the gradients of rank {rank} do not lie on a GPU"
        if not facts.nccl:
            return f"the torch of rank {rank} has no NCCL"
    holders: dict[str, int] = {}
    for rank, facts in sorted(members.items()):
        first = holders.setdefault(facts.gpu, rank)
        if first != rank:
            return f"ranks {first} and {rank} share a GPU"
    if any(facts.encrypt for facts in members.values()) and len({facts.host for facts in members.values()}) > 1:
        return "PSGC_ENCRYPT=1, and NCCL encrypts nothing between hosts"
    first, *others = sorted(members)
    for rank in others:
        if members[rank].nccl != members[first].nccl:
            return f"rank {first} has NCCL {members[first].nccl}, and rank {rank} has {members[rank].nccl}"
    return None


def _listed(members: Mapping[int, Facts]) -> str:
    return ", ".join(map(str, sorted(members)))
