"""What a group's operation sends and waits for, by the algorithm that runs it: bytes through a rank's link, and messages in a row.

With p ranks, each of which holds m bytes:

| routine                      | bytes through a rank's link, one way | messages in a row |
|------------------------------|--------------------------------------|-------------------|
| all_reduce (ring)            | 2 m (p - 1) / p                      | 2 (p - 1)         |
| all_reduce (tree)            | 2 m                                  | 2 log2 p          |
| reduce_scatter               | m (p - 1) / p                        | p - 1             |
| all_gather of shards         | m (p - 1)                            | p - 1             |
| reduce, broadcast (pipelined chain)  | m                            | p - 1             |
| all_gather.c of whole payloads       | m (p - 1): p pieces arrive   | p - 1             |
| all_to_all.c                 | m (p - 1) / p                        | p - 1             |
| gather.c                     | m (p - 1): p pieces reach the root   | p - 1             |

Published results count rings. A library takes the tree for an all_reduce wherever it is quicker, which is for small ones (NCCL's double binary tree, each half
of which carries half of the bytes up and down; the ranks of a node are a chain, of which one is the tree's).
Sources: Thakur et al. 2005; for double trees Sanders et al. 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from psgc.plan.inputs.carriers import MEMORY, NCCL, SOCKETS


class Collectives(NamedTuple):
    """How a job's collectives run. straight: the operations whose messages go straight to their destination, not around a ring; in_two: the operations
    that are made of two others; trees: whether an all_reduce may be a tree; within, between:
    the carriers that they pay for within a node and between nodes, "" for none."""

    straight: frozenset[str]
    in_two: Mapping[str, tuple[str, str]]
    trees: bool = False
    within: str = ""
    between: str = ""


RINGS: Final = Collectives(frozenset({"all_to_all", "gather"}), {})  # a library's, as the papers count them
LIBRARY: Final = RINGS._replace(trees=True)  # NCCL's, as DistributedDataParallel calls it
IN_HOSTS_MEMORY: Final = Collectives(RINGS.straight | {"reduce_scatter", "all_gather"}, {}, within=MEMORY, between=SOCKETS)
BETWEEN_GPUS: Final = Collectives(
    RINGS.straight | {"reduce_scatter"}, {"all_reduce": ("reduce_scatter", "all_gather"), "reduce": ("reduce_scatter", "gather")}, within=NCCL, between=NCCL
)  # fmt: skip
TREE_VOLUME: Final = 2.0


def volume_and_messages(operation: str, p: int, collectives: Collectives) -> tuple[float, float]:
    """The bytes through a rank's link divided by the bytes that it holds, and the number of consecutive messages."""
    if operation in collectives.in_two:
        (first, messages), (second, more) = (volume_and_messages(each, p, collectives) for each in collectives.in_two[operation])
        return first + second / p, messages + more
    if operation == "all_reduce":
        return 2 * (p - 1) / p, 2.0 * (p - 1)
    messages = p - 1.0
    if operation in ("reduce_scatter", "all_to_all"):
        return (p - 1) / p, messages
    if operation in ("reduce", "broadcast"):
        return 1.0, messages
    return p - 1.0, messages  # all_gather and gather, of shards or of whole payloads: what a rank holds, from each of the others


def levels_of_a_tree(p: int) -> int:
    """Messages in a row from a binary tree's farthest rank to its root."""
    return (p - 1).bit_length()
