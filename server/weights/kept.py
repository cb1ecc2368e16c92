"""What of weights outlives the server's process, as actions and as what they come to. Pure.

An update is committed before it is acknowledged, and an answer before it leaves. So a worker never has what the next process does not know of: a delta that
it does not know of is not in the weights, and is asked for again; a step that a worker has decoded is known to be answered.
"""

from __future__ import annotations

from typing import NamedTuple

from psgc.server.step import NO_SLOT


class VersionCommit(NamedTuple):
    """Make a version the key's weights. slot: its buffer; NO_SLOT if there is none, where initial values were NaN. poisoned: the weights are NaN from
    now on. applied: (rank, step) of the deltas that are in it and were not in the one before; a first step brings initial values, and is no push."""

    key: int
    version: int
    slot: int
    contributors: int
    payload_bytes: int
    poisoned: bool
    applied: tuple[tuple[int, int], ...]


class AnswerCommit(NamedTuple):
    """The rank's step is answered by a version, whose buffer it may read until its next step comes; NO_SLOT: by NaN."""

    key: int
    rank: int
    step: int
    version: int
    slot: int
    contributors: int


class KeptRank(NamedTuple):
    """applied: the last step whose delta is in the weights; pushes: how many are; the others: of its last answer."""

    applied: int = 0
    pushes: int = 0
    answered: int = 0
    version: int = 0
    slot: int = NO_SLOT
    contributors: int = 0


class KeptWeights(NamedTuple):
    """As of the last commits, whichever process made them."""

    version: int
    slot: int
    contributors: int
    payload_bytes: int
    poisoned: bool
    ranks: tuple[KeptRank, ...]


__all__ = ["AnswerCommit", "KeptRank", "KeptWeights", "VersionCommit"]
