"""A problem's options as a graph: the cost of each option at any size, and the cheapest option at given prices.

An option is a path through a graph whose edges are atoms. Options that end in the same atoms share them, so thousands of options make a graph of
a few hundred edges. A price is the cost of one microsecond on a resource. The cheapest option at given prices is a shortest path, which
one pass over the edges finds, so every option is considered. Owns the graph and that pass; ``choosing`` and ``bound`` choose the prices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.local_search.full_descent import Paths
from psgc.plan.model import options
from psgc.plan.model.costs import ALWAYS, IN_FLIGHT, NO_COPIES, Atom, CodecCosts, Task, copies_of, resources_of, walk
from psgc.plan.model.curves import Curves, Points, curves_of, task_times
from psgc.plan.model.options import DEVICES, Constraints, Option
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_OUT_F64: Final = types.Array(types.float64, 1, "C")
_OUT_I64: Final = types.Array(types.int64, 1, "C")
_OUT_I64_2D: Final = types.Array(types.int64, 2, "C")
_OUT_F64_3D: Final = types.Array(types.float64, 3, "C")
_OUT_I64_3D: Final = types.Array(types.int64, 3, "C")


@dataclass(frozen=True, eq=False)
class Graph:
    """Every option as a path from the last node to node 0.

    options: the options, by number; number: the inverse.
    rows:    each option's atoms, padded with -1.
    plain:   the numbers of the options that encode nothing.
    devices: whether an atom (row) runs on each of DEVICES (columns).
    first:   node i has the edges first[i] to before first[i + 1].
    atom:    each edge's atom.
    behind:  the node that each edge leads to; its number is less than that of the edge's own node.
    before:  the number of paths through the earlier edges of the same node. Along a path these add up to the option's number."""

    options: tuple[Option, ...]
    number: Mapping[Option, int]
    rows: Ints
    plain: Ints
    atoms: tuple[Atom, ...]
    devices: NDArray[np.bool_]
    first: Ints
    atom: Ints
    behind: Ints
    before: Ints

    @functools.cached_property
    def paths(self) -> Paths:
        """The graph as ``full_descent`` takes it. In the order of the edges, the last node's paths are the options by their numbers."""
        return Paths(self.first, self.atom, self.behind, np.concatenate([[0], np.cumsum(_paths(self.first, self.behind))]))


def _paths(first: Ints, behind: Ints) -> Ints:
    """The number of paths from each node to the end."""
    paths = np.ones(len(first) - 1, np.int64)
    for node in range(1, len(paths)):
        paths[node] = paths[behind[first[node] : first[node + 1]]].sum()
    return paths


@functools.cache
def graph(constraints: Constraints, copies: int = NO_COPIES, typed: bool = False) -> Graph:
    """The graph of the options that the constraints allow: a trie of their atoms with equal subtrees merged. copies, typed: see ``walk``."""
    return _graph(options.constrained(constraints), copies, typed)


@functools.cache  # constraints that differ may leave the same options
def _graph(found: tuple[Option, ...], copies: int, typed: bool) -> Graph:
    numbers: dict[Atom, int] = {}
    root: dict[int, Any] = {}
    paths = [[numbers.setdefault(atom, len(numbers)) for atom in walk(option, copies, typed)[0]] for option in found]
    for path in paths:
        node = root
        for atom in path:
            node = node.setdefault(atom, {})
    nodes: dict[tuple[tuple[int, int], ...], int] = {(): 0}

    def number_of(tree: dict[int, Any]) -> int:
        edges = tuple((atom, number_of(child)) for atom, child in tree.items())
        return nodes.setdefault(edges, len(nodes))

    number_of(root)
    edges = [edge for node in nodes for edge in node]
    first = np.concatenate([[0], np.cumsum([len(node) for node in nodes])]).astype(np.int64)
    atoms, behind = (np.array(column, np.int64) for column in zip(*edges, strict=True))
    before = _before(first, behind)
    rows = np.full((len(found), max(map(len, found))), -1, np.int64)
    places = _numbers_of(paths, first, atoms, behind, before)
    for place, path in zip(places, paths, strict=True):
        rows[place, : len(path)] = path
    number = {option: place for place, option in sorted(zip(places, found, strict=True))}
    plain = np.array([number[option] for option in found if options.is_uncompressed(option)], np.int64)
    devices = np.array([[device in options.devices_of((one.action,)) for device in DEVICES] for one in numbers])
    return Graph(tuple(number), number, rows, plain, tuple(numbers), devices, first, atoms, behind, before)


def _before(first: Ints, behind: Ints) -> Ints:
    """For each edge, the number of paths through the earlier edges of the same node."""
    paths, before = np.ones(len(first) - 1, np.int64), np.zeros(len(behind), np.int64)
    for node in range(1, len(paths)):
        edges = slice(first[node], first[node + 1])
        through = paths[behind[edges]]
        before[edges], paths[node] = np.cumsum(through) - through, through.sum()
    return before


def _numbers_of(paths: Sequence[Sequence[int]], first: Ints, atom: Ints, behind: Ints, before: Ints) -> list[int]:
    """The numbers of the options with these paths, lists of atoms."""
    bounds, through, skipped = first.tolist(), behind.tolist(), before.tolist()
    edges = [dict(zip(atom[begin:end].tolist(), range(begin, end), strict=True)) for begin, end in pairwise(bounds)]
    numbers = []
    for path in paths:
        node, number = len(edges) - 1, 0
        for one in path:
            edge = edges[node][one]
            number += skipped[edge]
            node = through[edge]
        numbers.append(number)
    return numbers


@helper
def _keep_less(value: Any, chosen: Any, through: Any, step: Any) -> None:
    """In each column, put the smaller of two costs in ``value`` and the other in ``through``, or infinity if both are equal. Most of a search's pricing
    is here; without branches the compiler vectorizes it."""
    for column in range(value.size):
        old, new, old_step, new_step = value[column], through[column], chosen[column], step[column]
        less, alike = new < old * (1 - 1e-9), new <= old * (1 + 1e-9)
        value[column] = new if less else old
        chosen[column] = new_step if less else old_step
        through[column] = old if less else (np.inf if alike else new)
        step[column] = old_step if less else new_step


@kernel(types.void(_IN_I64, _IN_I64, _IN_I64, _IN_F64_2D, _OUT_F64_3D, _OUT_I64_3D))
def _shortest(first: Any, atom: Any, behind: Any, cost: Any, value: Any, chosen: Any) -> None:
    """Find the cheapest paths from every node. value: set to their costs, by rank, node and column, strictly ascending in rank; chosen: set to
    each path's first step, as edge * ranks + rank at the next node."""
    ranks, columns = value.shape[0], cost.shape[1]
    through, step = np.empty(columns), np.empty(columns, np.int64)
    value[:] = np.inf
    value[0, 0] = 0.0
    for node in range(1, first.size - 1):
        for edge in range(first[node], first[node + 1]):
            for below in range(ranks):
                for column in range(columns):
                    through[column] = cost[atom[edge], column] + value[below, behind[edge], column]
                    step[column] = edge * ranks + below
                for rank in range(ranks):
                    _keep_less(value[rank, node], chosen[rank, node], through, step)


@kernel(I64(_IN_I64, I64, _OUT_I64))
def _unique(numbers: Any, below: Any, found: Any) -> Any:
    seen, count = np.zeros(below, np.bool_), 0
    for number in numbers:
        if not seen[number]:
            seen[number] = True
            found[count] = number
            count += 1
    return count


@kernel(types.void(_IN_I64_2D, _IN_I64_2D, _IN_I64, _IN_I64, _IN_F64_2D, _OUT_I64_2D, _OUT_I64, _OUT_I64, _OUT_F64, _OUT_F64))
def _table(
    rows: Any, of_atom: Any, numbers: Any, held: Any, times: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any
) -> None:
    """Fill an ``OptionTable``. rows: each option's atoms; of_atom: each atom's tasks; held: each task's resource; times: microseconds of tasks (rows)
    for kinds of parts (columns)."""
    end = 0
    for kind in range(times.shape[1]):
        for place in range(numbers.size):
            begin = end
            for atom in rows[numbers[place]]:
                for task in of_atom[atom]:
                    if task >= 0:
                        resource[end], us[end] = held[task], times[task, kind]
                        end += 1
            first[kind, place], length[place] = begin, end - begin
            left = 0.0
            for task in range(end - 1, begin - 1, -1):
                left += us[task]
                rest[task] = left


@kernel(
    types.void(
        _IN_I64, _IN_I64, types.Array(types.float64, 3, "C", readonly=True), types.Array(types.int64, 3, "C", readonly=True),
        types.Array(types.int64, 2, "C"),
    )
)  # fmt: skip
def _numbers(before: Any, behind: Any, value: Any, chosen: Any, numbers: Any) -> None:
    """Set ``numbers`` to the number of the chosen option, by column and rank; -1 for none."""
    ranks, last, columns = chosen.shape
    for rank in range(ranks):
        for column in range(columns):
            node, at = last - 1, rank
            numbers[column, rank] = 0 if value[rank, node, column] < np.inf else -1
            while node and numbers[column, rank] >= 0:
                edge, at = divmod(chosen[at, node, column], ranks)
                numbers[column, rank] += before[edge]
                node = behind[edge]


def holds(resources: Ints, rows: int) -> NDArray[np.bool_]:
    """Whether a task on each of these resources (columns) holds each of the first ``rows`` of RESOURCES (rows)."""
    held = [[one in resources_of(resource) for resource in resources.tolist()] for one in range(rows)]
    return np.array(held, bool).reshape(rows, len(resources))


Priced = tuple[Task, ...]  # one task, priced for each codec; only the cost per element differs


class OptionTable(NamedTuple):
    """The tasks of some options for parts of several kinds, one after the other. first: index in ``resource`` and ``us`` of an option's first
    task [kind, option]; length: each option's number of tasks; rest: microseconds of a task and those after it in its option, together."""

    first: Ints
    length: Ints
    resource: Ints
    us: F64
    rest: F64


class Space:
    """A problem's options and their costs. Options are identified by their numbers in the graph. Raises UsageError for constraints that leave no
    option.

    may_take:   by codec, the atoms that a bucket of this codec can have.
    held:       the first ``held`` of RESOURCES occur in this job.
    threads:    number of tasks that each resource does at once.
    moments_us: when each tensor is ready."""

    def __init__(self, problem: Problem) -> None:
        self.codecs = problem.codecs
        self.threads, self.moments_us = problem.threads, problem.tensors.ready_us
        _ = problem.options  # raises UsageError if no option is allowed
        self.graph = graph(problem.allowed, copies_of(problem.priced), problem.typed)
        self.distinct: list[Priced] = []
        numbered = self._number(problem)
        most = max(1, *map(len, numbered))
        self.of_atom = np.array(
            [[*numbers, *[-1] * (most - len(numbers))] for numbers in (*numbered, [])], np.int64
        )  # the last row is for -1, no atom
        self._count_of_atom = (self.of_atom >= 0).sum(axis=1)
        self.resources = np.array([task[0].resource for task in self.distinct], np.int64)
        self.held = max([ALWAYS, *(self.resources + 1).tolist()])
        self.fixed_us = np.array([task[0].fixed_us for task in self.distinct], np.float64)
        self._slope = np.array([[each.per_element_us for each in task] for task in self.distinct]).reshape(-1, len(self.codecs))
        self._share = np.array([task[0].share * task[0].times for task in self.distinct], np.float64)
        self._curve, self._curves = _curves(self.distinct, self.codecs)
        self.may_take = self._may_take(problem)
        self._all_fit = bool(self.may_take.all())
        counts = np.zeros((len(numbered) + 1, len(self.distinct) + 1))
        np.add.at(counts, (np.arange(len(counts))[:, None], self.of_atom), 1)
        # how often each atom holds each resource, or is in flight, with each task
        spent, in_flight = holds(self.resources, self.held), self.resources == IN_FLIGHT
        if in_flight.any():
            spent = np.concatenate([spent, in_flight[None]])
        self.uses = counts[:-1, :-1] * spent[:, None, :]

    def _number(self, problem: Problem) -> list[list[int]]:
        """Each atom's tasks, as indices into ``distinct``. Tasks that differ only in their action's name are the same."""
        place: dict[Any, int] = {}
        found = []
        for atom in self.graph.atoms:
            numbers = []
            for task in zip(*[problem.price(atom, codec) for codec in self.codecs], strict=True):
                number = place.setdefault(
                    task[0][1:] + tuple([(each.per_element_us, each.points, each.curve) for each in task[1:]]), len(place)
                )
                if number == len(self.distinct):
                    self.distinct.append(task)
                numbers.append(number)
            found.append(numbers)
        return found

    def _may_take(self, problem: Problem) -> NDArray[np.bool_]:
        """By codec, the atoms that run on devices allowed to it, that carry its payloads, and for all of whose tasks it has times."""
        takes = np.array([[device in problem.devices(codec) for device in DEVICES] for codec in self.codecs])
        has = self._curve >= 0
        has[[not task[0].is_curve for task in self.distinct]] = True
        has = np.append(has, np.ones((1, len(self.codecs)), bool), axis=0)
        every: NDArray[np.bool_] = np.logical_and.reduce(has[self.of_atom[:-1]], axis=1).T
        carried = np.array([[problem.carries(atom.action, codec) for atom in self.graph.atoms] for codec in self.codecs])
        found: NDArray[np.bool_] = ~(~takes @ self.graph.devices.T) & every & carried
        return found

    def unique(self, numbers: Ints) -> Ints:
        """The numbers without duplicates, in order of first appearance."""
        found = np.empty(len(numbers), np.int64)
        return found[: _unique(numbers, len(self.graph.options), found)]

    def positions(self, among: Ints, numbers: Ints) -> Ints:
        """Index of each number in ``among``, which has no duplicates."""
        place = np.empty(len(self.graph.options), np.int64)
        place[among] = np.arange(len(among))
        return place.take(numbers)  # row after row, whatever the order of ``numbers``

    def rows(self, numbers: Ints) -> Ints:
        """The options' tasks, one row for each option, as indices into ``distinct``, with -1 between and after them."""
        return self.of_atom[self.graph.rows[numbers]].reshape(len(numbers), self.graph.rows.shape[1] * self.of_atom.shape[1])

    def tasks(self, numbers: Ints) -> Ints:
        """The options' tasks, one row for each option, as indices into ``distinct``, with -1 behind them."""
        rows = self.rows(numbers)
        found = np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
        return np.ascontiguousarray(found[:, : max(1, int((found >= 0).sum(axis=1).max()))])

    @property
    def costs(self) -> tuple[F64, F64, Ints, F64, Ints, F64, F64]:
        """The tasks' costs, as ``task_times`` takes them."""
        return self.fixed_us, self._slope, self._curve, self._share, *self._curves

    def table(self, numbers: Ints, sizes: F64, codec: Ints) -> OptionTable:
        """The options' tasks for parts of these sizes and codecs."""
        count = len(sizes) * int(self._count_of_atom[self.graph.rows[numbers]].sum())
        first, length = np.empty((len(sizes), len(numbers)), np.int64), np.empty(len(numbers), np.int64)
        table = OptionTable(first, length, np.empty(count, np.int64), np.empty(count), np.empty(count))
        _table(self.graph.rows, self.of_atom, numbers, self.resources, self.times(sizes, codec), *table)
        return table

    def times(self, numel: F64, codec: Ints) -> F64:
        """Microseconds of each distinct task (rows) for parts of these sizes and codecs (columns). 0 for tasks for which a codec has no times;
        ``may_take`` says which options it can have."""
        times = np.empty((len(self.distinct), len(numel)))
        task_times(*self.costs, numel, codec, times)
        return times

    def least_times(self, numel: F64, codec: Ints) -> F64:
        """Like ``times``, but the minimum over all parts of at least this size, because a measured curve may fall."""
        times = np.empty((len(self.distinct), len(numel)))
        first, sizes, us = self._curves
        least = us.copy()
        for begin, end in pairwise(first.tolist()):
            least[begin:end] = np.minimum.accumulate(us[begin:end][::-1])[::-1]
        task_times(self.fixed_us, self._slope, self._curve, self._share, first, sizes, least, numel, codec, times)
        return times

    def least_us_per_element(self) -> F64:
        """Lower bound on the microseconds per element of each distinct task (rows), by codec (columns), whatever the bucket's size."""
        rows = [
            [codec.least_us_per_element(each) if codec.has(each) else 0.0 for codec, each in zip(self.codecs, task, strict=True)]
            for task in self.distinct
        ]
        return np.array(rows).reshape(len(rows), len(self.codecs))

    def fits(self, numbers: Ints) -> NDArray[np.bool_]:
        """Whether buckets of each codec (rows) can have each of the options (columns)."""
        if self._all_fit:
            return np.ones((len(self.codecs), len(numbers)), bool)
        may_take = np.append(self.may_take, np.ones((len(self.codecs), 1), bool), axis=1)
        fits: NDArray[np.bool_] = np.logical_and.reduce(may_take[:, self.graph.rows[numbers]], axis=2)
        return fits

    def loads(self, times: F64) -> F64:
        """Microseconds for which each atom holds each resource, and in flight if some tasks are: [resource, atom, column of ``times``]."""
        found: F64 = self.uses @ times
        return found

    def shortest(self, costs: F64, ranks: int = 1) -> tuple[F64, Ints]:
        """The ``ranks`` cheapest options, of different costs, for each column of atoms' costs. Returns their costs [ranks, columns], inf for none,
        and their numbers [columns, ranks], -1 for none."""
        columns, nodes = costs.shape[1], self.graph.first.size - 1
        value, chosen = np.empty((ranks, nodes, columns)), np.zeros((ranks, nodes, columns), np.int64)
        _shortest(self.graph.first, self.graph.atom, self.graph.behind, np.ascontiguousarray(costs), value, chosen)
        numbers = np.empty((columns, ranks), np.int64)
        _numbers(self.graph.before, self.graph.behind, value, chosen, numbers)
        return value[:, -1], numbers


def _curves(tasks: Sequence[Priced], codecs: Sequence[CodecCosts]) -> tuple[Ints, Curves]:
    """The index of each task's curve (rows) by codec (columns), -1 for none; and the curves."""
    numbers: dict[Any, int] = {}
    found = np.full((len(tasks), len(codecs)), -1, np.int64)
    points: list[Points] = []
    for row, task in enumerate(tasks):
        for column, each in enumerate(task):
            if not each.is_curve:
                continue
            key = each.curve, each.factor, each.points, column
            if key not in numbers:
                known = codecs[column].has(each)
                numbers[key] = len(points) if known else -1
                points += [codecs[column].points(each)] if known else []
            found[row, column] = numbers[key]
    return found, curves_of(points)
