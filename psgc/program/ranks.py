"""Which ranks a job has on each node, and how a part is cut among them. Pure.

Nodes may have different numbers of ranks. A rank's *shard* of a part is its slice among the ranks of its node. Nodes of different sizes cut
at different places; between two neighbouring cuts of any node lies an *atom*: a slice that lies inside one rank's shard on every node, so
that one rank of each node owns it, and these ranks can sum it between the nodes.

Two things may be said of a node. Its *roots* are the local ranks among which alone parts are cut, such as those whose GPUs are not behind the network
interface's PCIe switch; the others' shards are empty. Or its ranks lie behind several *switches*, which have as many each, in the order of the local ranks: a
node's sum is then taken behind each switch first, each rank a slice of it, and between the switches by those ranks that have the same slice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

from psgc.codecs.codec import BLOCK

Range = tuple[int, int]
_ALIGNED_FROM: Final = 16  # shards of at least so many blocks are cut at whole blocks


@dataclass(frozen=True)
class Ranks:
    """node_sizes: the ranks of each node; the job's ranks are numbered node after node. roots: local ranks of each node, ascending; nothing for all of them.
    switches: the ranks behind one switch, of each node; 0, or all of them, where sums are taken at once. A node has roots or switches, not both."""

    node_sizes: tuple[int, ...]
    roots: tuple[tuple[int, ...], ...] = ()
    switches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.node_sizes, "a job has a node"
        assert min(self.node_sizes) > 0, self.node_sizes
        for node, size in enumerate(self.node_sizes):
            fault = fault_of(size, self.roots[node] if self.roots else (), self.switches[node] if self.switches else 0)
            assert not fault, f"node {node}: {fault}"

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

    @property
    def text(self) -> str:
        """What tells these ranks from others, on nodes of other sizes or of another inside."""
        inside = [str(one) for one in (self.roots, self.switches) if one]
        return " ".join((str(self.node_sizes), *inside))

    def roots_of(self, node: int) -> tuple[int, ...]:
        """The node's local ranks that own shards."""
        return (self.roots[node] if self.roots else ()) or tuple(range(self.node_sizes[node]))

    def switch_of(self, node: int) -> int:
        """How many of the node's ranks are behind one switch; 0 where its sums are taken at once."""
        size = self.switches[node] if self.switches else 0
        return size if 1 < size < self.node_sizes[node] else 0

    def shards(self, node: int, numel: int) -> tuple[Range, ...]:
        """What of a part of ``numel`` elements each of the node's ranks owns, by local rank: ascending, unless the node has switches; empty for one that is
        no root."""
        size, switch = self.node_sizes[node], self.switch_of(node)
        if switch:
            slices = cuts(0, numel, switch)
            finer = [cuts(slices[place], slices[place + 1], size // switch) for place in range(switch)]
            return tuple((finer[rank % switch][rank // switch], finer[rank % switch][rank // switch + 1]) for rank in range(size))
        roots = self.roots_of(node)
        places = cuts(0, numel, len(roots))
        before = [bisect_left(roots, rank) for rank in range(size)]
        return tuple((places[number], places[number + (rank in roots)]) for rank, number in enumerate(before))

    def atoms(self, numel: int) -> tuple[Range, ...]:
        """The slices between the cuts of all nodes, without empty ones."""
        kinds = {(size, self.roots_of(node), self.switch_of(node)): node for node, size in enumerate(self.node_sizes)}
        places = sorted({place for node in kinds.values() for shard in self.shards(node, numel) for place in shard})
        return tuple((lo, hi) for lo, hi in pairwise(places) if lo < hi)

    def owners(self, numel: int, atom: Range) -> tuple[int, ...]:
        """The rank of each node whose shard the atom lies in."""
        found = []
        for node in range(self.nodes):
            own = next(i for i, (lo, hi) in enumerate(self.shards(node, numel)) if lo <= atom[0] and atom[1] <= hi)
            found.append(self._first[node] + own)
        return tuple(found)


def fault_of(size: int, roots: Sequence[int], switch: int) -> str:
    """Why a node of so many ranks cannot have these roots or switches; "" if it can."""
    if roots and switch and switch < size:
        return "it has roots and several switches; name one of the two"
    if list(roots) != sorted(set(roots)) or any(not 0 <= root < size for root in roots):
        return f"its roots are {', '.join(map(str, roots))}, expected local ranks from 0 to {size - 1}, each once and in order"
    if 0 < switch < size and size % switch:
        return f"switches of {switch} ranks do not divide its {size}"
    return ""


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
