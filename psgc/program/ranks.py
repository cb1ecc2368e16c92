"""Which ranks a job has on each node, and how a part is cut among them. Pure.

Nodes may have different numbers of ranks. A rank's *shard* of a part is its slice among the ranks of its node. Nodes of different sizes cut
at different places; between two neighbouring cuts of any node lies an *atom*: a slice that lies inside one rank's shard on every node, so
that one rank of each node owns it, and these ranks can sum it between the nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

from psgc.codecs.codec import BLOCK

Range = tuple[int, int]
_ALIGNED_FROM: Final = 16  # shards of at least so many blocks are cut at whole blocks


@dataclass(frozen=True)
class Ranks:
    """node_sizes: the ranks of each node; the job's ranks are numbered node after node."""

    node_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.node_sizes, "a job has a node"
        assert min(self.node_sizes) > 0, self.node_sizes

    @cached_property
    def size(self) -> int:
        return sum(self.node_sizes)

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    @cached_property
    def everybody(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @cached_property
    def _first(self) -> tuple[int, ...]:
        return (0, *accumulate(self.node_sizes))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    def on_node(self, node: int) -> tuple[int, ...]:
        return tuple(range(self._first[node], self._first[node + 1]))

    def shards(self, node: int, numel: int) -> tuple[int, ...]:
        """Where the node's ranks cut a part of ``numel`` elements."""
        return cuts(0, numel, self.node_sizes[node])

    def atoms(self, numel: int) -> tuple[Range, ...]:
        """The slices between the cuts of all nodes, without empty ones."""
        places = sorted({place for size in set(self.node_sizes) for place in cuts(0, numel, size)})
        return tuple((lo, hi) for lo, hi in pairwise(places) if lo < hi)

    def owners(self, numel: int, atom: Range) -> tuple[int, ...]:
        """The rank of each node whose shard the atom lies in."""
        found = []
        for node in range(self.nodes):
            shards = self.shards(node, numel)
            found.append(
                self._first[node] + next(i for i in range(self.node_sizes[node]) if shards[i] <= atom[0] and atom[1] <= shards[i + 1])
            )
        return tuple(found)


def cuts(lo: int, hi: int, shares: int) -> tuple[int, ...]:
    """Where [lo, hi) is cut into ``shares`` slices as equal as whole blocks allow, or, where slices have few blocks, as elements do."""
    numel = hi - lo
    unit = BLOCK if numel >= shares * _ALIGNED_FROM * BLOCK else 1
    units = -(-numel // unit)
    return (*(min(hi, lo + unit * (units * i // shares)) for i in range(shares)), hi)


def pieces_of(places: Collection[int], within: Range) -> tuple[Range, ...]:
    """[lo, hi) cut at those of ``places`` that lie inside it."""
    lo, hi = within
    inside = sorted({place for place in places if lo < place < hi})
    return tuple((a, b) for a, b in pairwise((lo, *inside, hi)) if a < b)
