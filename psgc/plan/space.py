"""A problem's options as a graph: what each costs at any size, and which is the cheapest of all at given prices.

An option is a way through a graph whose edges are atoms; options that go on alike share the rest of their ways, so thousands of them make a
graph of a few hundred edges. Prices say what a microsecond on each resource is worth. The cheapest of all options at some prices is the
shortest way, found by one pass over the edges: no option is left out. Owns the graph and that pass; which prices to ask is ``search``'s
and ``bound``'s business.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.kernel import I64, kernel
from psgc.plan import options
from psgc.plan.costs import BOTH_WAYS, RECEIVE, RESOURCES, SEND, Atom, Task, price, walk
from psgc.plan.options import Constraints, Option
from psgc.plan.problem import Problem
from psgc.plan.profile import F64
from psgc.plan.timeline import Ints

_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_OUT_F64_2D: Final = types.Array(types.float64, 2, "C")
_OUT_I64_2D: Final = types.Array(types.int64, 2, "C")


@dataclass(frozen=True, eq=False)
class Graph:
    """Every option as a way from the last node to node 0. Node i has the edges first[i] to first[i + 1], each with its atom, and the node
    behind it, whose number is less than i."""

    options: tuple[Option, ...]
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
    return Graph(found, tuple(numbers), first, atoms, behind)


@kernel(types.void(_IN_I64, _IN_I64, _IN_I64, _IN_F64_2D, _OUT_F64_2D, _OUT_I64_2D))
def _shortest(first: Any, atom: Any, behind: Any, cost: Any, value: Any, chosen: Any) -> None:
    value[0] = 0.0
    for node in range(1, first.size - 1):
        value[node] = np.inf
        for edge in range(first[node], first[node + 1]):
            for column in range(cost.shape[1]):
                through = cost[atom[edge], column] + value[behind[edge], column]
                if through < value[node, column]:
                    value[node, column], chosen[node, column] = through, edge


@kernel(I64(_IN_I64, _IN_I64, types.Array(types.int64, 2, "C", readonly=True), I64, types.Array(types.int64, 1, "C")))
def _way(atom: Any, behind: Any, chosen: Any, column: Any, way: Any) -> Any:
    node, length = chosen.shape[0] - 1, 0
    while node:
        edge = chosen[node, column]
        way[length] = atom[edge]
        length, node = length + 1, behind[edge]
    return length


class Space:
    """A problem's options, priced. ``way``: an option as numbers of its atoms."""

    def __init__(self, problem: Problem) -> None:
        self.codec = problem.codec
        self.graph = graph(problem.allowed)
        self.tasks: list[list[Task]] = [price(atom, problem.cluster, problem.codec) for atom in self.graph.atoms]
        self.distinct = list(dict.fromkeys(task._replace(action="") for tasks in self.tasks for task in tasks))
        self._number = {task: number for number, task in enumerate(self.distinct)}
        self.task_numbers = [[self._number[task._replace(action="")] for task in tasks] for tasks in self.tasks]
        self.resources = np.array([task.resource for task in self.distinct], np.int64)
        self._fixed = np.array([[task.fixed_us] for task in self.distinct])
        self._slope = np.array([[task.per_element_us] for task in self.distinct])
        self._curves = _by_curve(self.distinct)
        # how often each atom has each task on each resource
        self.uses = np.zeros((len(RESOURCES), len(self.tasks), len(self.distinct)))
        for atom, numbers in enumerate(self.task_numbers):
            for number in numbers:
                resource = self.distinct[number].resource
                for one in (SEND, RECEIVE) if resource == BOTH_WAYS else (resource,):
                    self.uses[one, atom, number] += 1

    def times(self, numel: F64) -> F64:
        """Microseconds of each distinct task (rows) for parts of these numbers of elements (columns)."""
        times = self._fixed + self._slope * numel
        for tasks, elements in self._curves:  # alike but for how many elements they have to do with
            times[tasks] = self.codec.all_us(self.distinct[tasks[0]]._replace(share=1.0, times=1.0), elements[:, None] * numel)
        return times

    def loads(self, times: F64) -> F64:
        """Microseconds of each atom on each resource: resources, atoms, and times' columns."""
        return self.uses @ times

    def shortest(self, costs: F64) -> tuple[F64, list[tuple[int, ...]]]:
        """The cheapest of all options for each column of atoms' costs: its cost, and its way."""
        nodes = self.graph.first.size - 1
        value, chosen = np.empty((nodes, costs.shape[1])), np.zeros((nodes, costs.shape[1]), np.int64)
        _shortest(self.graph.first, self.graph.atom, self.graph.behind, np.ascontiguousarray(costs), value, chosen)
        way = np.empty(64, np.int64)
        ways = []
        for column in range(costs.shape[1]):
            length = _way(self.graph.atom, self.graph.behind, chosen, column, way)
            ways.append(tuple(way[:length].tolist()))
        return value[-1], ways

    def option(self, way: tuple[int, ...]) -> Option:
        return tuple(self.graph.atoms[atom].action for atom in way)


def _by_curve(tasks: list[Task]) -> list[tuple[list[int], F64]]:
    """The tasks of each curve, and what part of a bucket's elements each of them has to do with."""
    found: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        if task.curve:
            found.setdefault(task.curve, []).append(number)
    return [(numbers, np.array([tasks[number].share * tasks[number].times for number in numbers])) for numbers in found.values()]
