"""The ranks of a job's nodes, and how a part is cut among them. Pure.

Nodes may have different numbers of ranks. A rank's *shard* of a part is its slice among the ranks of its node. Nodes of different sizes cut
at different places. An *atom* is the slice between two neighbouring cuts of any nodes: on every node it lies inside one rank's shard, so one rank of
each node owns it, and these ranks can sum it between the nodes.

A node may have roots or switches. Only its *roots*, which are local ranks, own shards; the other ranks' shards are empty. Roots are, for example, the
ranks whose GPUs are not behind the network interface's PCIe switch. *Switches* have equally many ranks each, in the order of the local ranks. A node's
sum is then taken behind each switch first, where each rank sums a slice, and then between the switches, by the ranks with the same slice.
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
    """The ranks of a job, numbered node after node. node_sizes: the number of ranks of each node; roots: the local ranks of each node that own shards,
    ascending; () for all of them; switches: the number of ranks behind one switch, for each node; 0 or all of them for no stage between switches. A node
    has roots or switches, not both."""

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
        """The node of each rank."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    def on_node(self, node: int) -> tuple[int, ...]:
        return tuple(range(self._first[node], self._first[node + 1]))

    @property
    def text(self) -> str:
        """A text that differs between nodes of different sizes, roots or switches."""
        inside = [str(one) for one in (self.roots, self.switches) if one]
        return " ".join((str(self.node_sizes), *inside))

    @property
    def inside(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Of each node its roots and its ranks behind one switch, as they are set."""
        roots, switches = self.roots or ((),) * self.nodes, self.switches or (0,) * self.nodes
        return tuple(zip(roots, switches, strict=True))

    def roots_of(self, node: int) -> tuple[int, ...]:
        """The node's local ranks that own shards."""
        return (self.roots[node] if self.roots else ()) or tuple(range(self.node_sizes[node]))

    def switch_of(self, node: int) -> int:
        """The number of the node's ranks behind one switch; 0 if there is no stage between switches."""
        size = self.switches[node] if self.switches else 0
        return size if 1 < size < self.node_sizes[node] else 0

    def shards(self, node: int, numel: int) -> tuple[Range, ...]:
        """The shard of each of the node's ranks of a part of ``numel`` elements, by local rank. They ascend unless the node has switches; a rank that is no
        root has an empty one."""
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
        """For each node, the rank whose shard contains the atom."""
        found = []
        for node in range(self.nodes):
            own = next(i for i, (lo, hi) in enumerate(self.shards(node, numel)) if lo <= atom[0] and atom[1] <= hi)
            found.append(self._first[node] + own)
        return tuple(found)


def fault_of(size: int, roots: Sequence[int], switch: int) -> str:
    """Why a node of ``size`` ranks cannot have these roots or switches; "" if it can."""
    if roots and switch and switch < size:
        return "it has roots and several switches; name one of the two"
    if list(roots) != sorted(set(roots)) or any(not 0 <= root < size for root in roots):
        return f"its roots are {', '.join(map(str, roots))}, expected local ranks from 0 to {size - 1}, each once and in order"
    if 0 < switch < size and size % switch:
        return f"switches of {switch} ranks do not divide its {size}"
    return ""


def cuts(lo: int, hi: int, shares: int) -> tuple[int, ...]:
    """The bounds of ``shares`` slices of [lo, hi), of equal numbers of blocks as far as possible, or of elements if slices have few blocks."""
    numel = hi - lo
    unit = BLOCK if numel >= shares * _ALIGNED_FROM * BLOCK else 1
    units = -(-numel // unit)
    return (*(min(hi, lo + unit * (units * i // shares)) for i in range(shares)), hi)


def pieces_of(places: Collection[int], within: Range) -> tuple[Range, ...]:
    """The range cut at those of ``places`` that lie inside it."""
    lo, hi = within
    inside = sorted({place for place in places if lo < place < hi})
    return tuple((a, b) for a, b in pairwise((lo, *inside, hi)) if a < b)
