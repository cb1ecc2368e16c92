"""A problem's options as a graph: what each costs at any size, and which is the cheapest of all at given prices.

An option is a way through a graph whose edges are atoms; options that go on alike share the rest of their ways, so thousands of them make a
graph of a few hundred edges. Prices say what a microsecond on each resource is worth. The cheapest of all options at some prices is the
shortest way, found by one pass over the edges: no option is left out. Owns the graph and that pass; which prices to ask is ``search``'s
and ``bound``'s business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.kernel import kernel
from psgc.plan import options
from psgc.plan.costs import BOTH_WAYS, RECEIVE, RESOURCES, SEND, Atom, Task, price, walk
from psgc.plan.options import Constraints, Option
from psgc.plan.problem import Problem
from psgc.plan.profile import F64
from psgc.plan.timeline import Ints

Way = tuple[int, ...]  # an option, as numbers of its atoms
LONGEST: Final = 16  # actions of an option
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_OUT_F64_3D: Final = types.Array(types.float64, 3, "C")
_OUT_I64_3D: Final = types.Array(types.int64, 3, "C")


@dataclass(frozen=True, eq=False)
class Graph:
    """Every option as a way from the last node to node 0. Node i has the edges first[i] to first[i + 1], each with its atom, and the node
    behind it, whose number is less than i. ways: of each option; plain: those that encode nothing."""

    ways: Mapping[Option, Way]
    plain: tuple[Way, ...]
    atoms: tuple[Atom, ...]
    first: Ints
    atom: Ints
    behind: Ints


@functools.cache
def graph(constraints: Constraints) -> Graph:
    """Of the options that are left: the trie of their atoms, with equal subtrees made one."""
    found = options.constrained(constraints)
    numbers: dict[Atom, int] = {}
    root: dict[int, Any] = {}
    for option in found:
        node = root
        for atom in walk(option)[0]:
            node = node.setdefault(numbers.setdefault(atom, len(numbers)), {})
    nodes: dict[tuple[tuple[int, int], ...], int] = {(): 0}

    def number_of(tree: dict[int, Any]) -> int:
        edges = tuple((atom, number_of(child)) for atom, child in tree.items())
        return nodes.setdefault(edges, len(nodes))

    number_of(root)
    edges = [edge for node in nodes for edge in node]
    first = np.concatenate([[0], np.cumsum([len(node) for node in nodes])]).astype(np.int64)
    atoms, behind = (np.array(column, np.int64) for column in zip(*edges, strict=True))
    ways = {option: tuple(numbers[atom] for atom in walk(option)[0]) for option in found}
    plain = tuple(way for option, way in ways.items() if options.is_uncompressed(option))
    return Graph(ways, plain, tuple(numbers), first, atoms, behind)


@kernel(types.void(_IN_I64, _IN_I64, _IN_I64, _IN_F64_2D, _OUT_F64_3D, _OUT_I64_3D))
def _shortest(first: Any, atom: Any, behind: Any, cost: Any, value: Any, chosen: Any) -> None:
    """value, chosen: by rank, node and column, what the cheapest ways from a node cost, each more than the one before, and their first steps:
    edge * ranks + rank at the node behind it."""
    ranks = value.shape[0]
    value[:] = np.inf
    value[0, 0] = 0.0
    for node in range(1, first.size - 1):
        for edge in range(first[node], first[node + 1]):
            for below in range(ranks):
                for column in range(cost.shape[1]):
                    through = cost[atom[edge], column] + value[below, behind[edge], column]
                    rank = ranks
                    while rank and through < value[rank - 1, node, column] * (1 - 1e-9):
                        rank -= 1
                    if rank == ranks or (rank and through <= value[rank - 1, node, column] * (1 + 1e-9)):
                        continue
                    for one in range(ranks - 1, rank, -1):
                        value[one, node, column] = value[one - 1, node, column]
                        chosen[one, node, column] = chosen[one - 1, node, column]
                    value[rank, node, column], chosen[rank, node, column] = through, edge * ranks + below


@kernel(
    types.void(
        _IN_I64, _IN_I64, types.Array(types.float64, 3, "C", readonly=True), types.Array(types.int64, 3, "C", readonly=True), _OUT_I64_3D
    )
)
def _ways(atom: Any, behind: Any, value: Any, chosen: Any, ways: Any) -> None:
    ways[:] = -1
    ranks, last, columns = chosen.shape
    for rank in range(ranks):
        for column in range(columns):
            node, at, length = last - 1, rank, 0
            while node and value[rank, last - 1, column] < np.inf:
                edge, at = divmod(chosen[at, node, column], ranks)
                ways[rank, column, length] = atom[edge]
                length, node = length + 1, behind[edge]


Priced = tuple[Task, ...]  # one task as each codec has it; they differ in what an element costs


class Space:
    """A problem's options, priced. ``way``: an option as numbers of its atoms. may_take: by codec, the atoms that buckets of it can have.
    Raises UsageError for constraints that leave no option."""

    def __init__(self, problem: Problem) -> None:
        self.codecs = problem.codecs
        _ = problem.options  # where there are none, says why
        self.graph = graph(problem.allowed)
        tasks: list[list[Priced]] = [
            list(zip(*(_without_names(price(atom, problem.cluster, codec)) for codec in self.codecs), strict=True))
            for atom in self.graph.atoms
        ]
        self.distinct = list(dict.fromkeys(task for one in tasks for task in one))
        place = {task: number for number, task in enumerate(self.distinct)}
        self.task_numbers = [[place[task] for task in one] for one in tasks]
        self._sequences: dict[Way, Ints] = {}
        self.may_take = np.array([[problem.takes((atom.action,), codec) for atom in self.graph.atoms] for codec in self.codecs])
        self.resources = np.array([task[0].resource for task in self.distinct], np.int64)
        self._fixed = np.array([[task[0].fixed_us] for task in self.distinct])
        self._slope = np.array([[each.per_element_us for each in task] for task in self.distinct])
        self._curves = _by_curve([task[0] for task in self.distinct])
        # how often each atom has each task on each resource
        self.uses = np.zeros((len(RESOURCES), len(tasks), len(self.distinct)))
        for atom, numbers in enumerate(self.task_numbers):
            for number in numbers:
                resource = self.distinct[number][0].resource
                for one in (SEND, RECEIVE) if resource == BOTH_WAYS else (resource,):
                    self.uses[one, atom, number] += 1

    def sequence(self, way: Way) -> Ints:
        """An option's tasks, as numbers of ``distinct``."""
        found = self._sequences.get(way)
        if found is None:
            found = self._sequences[way] = np.array([task for atom in way for task in self.task_numbers[atom]], np.int64)
        return found

    def times(self, numel: F64, codec: Ints) -> F64:
        """Microseconds of each distinct task (rows) for parts of these numbers of elements and codecs (columns). Tasks that a codec cannot
        have take none; whoever chooses asks ``may_take``."""
        times: F64 = self._fixed + self._slope[:, codec] * numel
        for number, costs in enumerate(self.codecs):
            (columns,) = np.nonzero(codec == number)
            for tasks, alone, elements in self._curves if len(columns) else ():
                if costs.has(alone):
                    times[tasks[:, None], columns] = costs.all_us(alone, elements * numel[columns])
        return times

    def least_us_per_element(self) -> F64:
        """What an element costs at least in each distinct task (rows), in buckets however large, by codec (columns)."""
        return np.array(
            [
                [costs.least_us_per_element(each) if costs.has(each) else 0.0 for each, costs in zip(task, self.codecs, strict=True)]
                for task in self.distinct
            ]
        )

    def fits(self, ways: Sequence[Way]) -> NDArray[np.bool_]:
        """Which codecs' (rows) buckets can have which of the ways (columns)."""
        if self.may_take.all():
            return np.ones((len(self.codecs), len(ways)), bool)
        return np.array([self.may_take[:, list(way)].all(axis=1) for way in ways]).T

    def loads(self, times: F64) -> F64:
        """Microseconds of each atom on each resource: resources, atoms, and times' columns."""
        return self.uses @ times

    def shortest(self, costs: F64, ranks: int = 1) -> tuple[F64, list[list[Way]]]:
        """The cheapest of all options for each column of atoms' costs, and the next ones that cost more, up to ``ranks`` of them: their costs
        (ranks, columns; inf where there is none), and by column their ways."""
        columns, nodes = costs.shape[1], self.graph.first.size - 1
        value, chosen = np.empty((ranks, nodes, columns)), np.zeros((ranks, nodes, columns), np.int64)
        _shortest(self.graph.first, self.graph.atom, self.graph.behind, np.ascontiguousarray(costs), value, chosen)
        ways = np.empty((ranks, columns, LONGEST), np.int64)
        _ways(self.graph.atom, self.graph.behind, value, chosen, ways)
        known: dict[bytes, Way] = {}
        found: list[list[Way]] = [[] for _ in range(columns)]
        for rank in range(ranks):
            for column, row in enumerate(ways[rank]):
                if row[0] >= 0:
                    key = row.tobytes()
                    found[column].append(known.get(key) or known.setdefault(key, tuple(row[row >= 0].tolist())))
        return value[:, -1], found

    def option(self, way: Way) -> Option:
        return tuple(self.graph.atoms[atom].action for atom in way)


def _without_names(tasks: list[Task]) -> list[Task]:
    """Equal work is the same whatever its action is called."""
    return [task._replace(action="") for task in tasks]


def _by_curve(tasks: list[Task]) -> list[tuple[Ints, Task, F64]]:
    """The tasks of each curve, one that stands for them, and what part of a bucket's elements each of them has to do with."""
    found: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        if task.curve:
            found.setdefault(task.curve, []).append(number)
    return [
        (
            np.array(numbers), tasks[numbers[0]]._replace(share=1.0, times=1.0),
            np.array([[tasks[number].share * tasks[number].times] for number in numbers]),
        )
        for numbers in found.values()
    ]  # fmt: skip
