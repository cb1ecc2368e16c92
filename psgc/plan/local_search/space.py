"""A problem's options as a graph: what each costs at any size, and which is the cheapest of all at given prices.

An option is a path through a graph whose edges are atoms. Options with equal remainders share them, so thousands of options make a graph of
a few hundred edges. A price is the cost of a microsecond on a resource. The cheapest of all options at given prices is the shortest path,
found by one pass over the edges, so no option is left out. Owns the graph and that pass; ``search`` and ``bound`` choose the prices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
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
from psgc.plan.model.costs import ALWAYS, IN_FLIGHT, NO_COPIES, Atom, CodecCosts, Task, copies_of, price, resources_of, walk
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
    """Every option as a path from the last node to node 0. Node i has the edges first[i] to first[i + 1]. Each edge has its atom; the node
    behind it, whose number is less than i; and the number of paths through the node's edges before it. Along a path these add up to the
    option's number.

    options: by number; number: of each; rows: each one's atoms, filled up with -1; plain: the numbers of those that encode nothing; devices:
    which of DEVICES (columns) an atom (rows) is on."""

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
        """For ``full_descent``. In the order of the edges, the last node's paths are the options by their numbers."""
        return Paths(self.first, self.atom, self.behind, np.concatenate([[0], np.cumsum(_paths(self.first, self.behind))]))


def _paths(first: Ints, behind: Ints) -> Ints:
    """Of each node, the number of paths to the end."""
    paths = np.ones(len(first) - 1, np.int64)
    for node in range(1, len(paths)):
        paths[node] = paths[behind[first[node] : first[node + 1]]].sum()
    return paths


@functools.cache
def graph(constraints: Constraints, copies: int = NO_COPIES) -> Graph:
    """The graph of the options that the constraints allow: the trie of their atoms, with equal subtrees merged. copies: as ``walk`` takes it."""
    found = options.constrained(constraints)
    numbers: dict[Atom, int] = {}
    root: dict[int, Any] = {}
    for option in found:
        node = root
        for atom in walk(option, copies)[0]:
            node = node.setdefault(numbers.setdefault(atom, len(numbers)), {})
    nodes: dict[tuple[tuple[int, int], ...], int] = {(): 0}

    def number_of(tree: dict[int, Any]) -> int:
        edges = tuple((atom, number_of(child)) for atom, child in tree.items())
        return nodes.setdefault(edges, len(nodes))

    number_of(root)
    edges = [edge for node in nodes for edge in node]
    first = np.concatenate([[0], np.cumsum([len(node) for node in nodes])]).astype(np.int64)
    atoms, behind = (np.array(column, np.int64) for column in zip(*edges, strict=True))
    before = _before(first, behind)
    ordered = _by_number(first, atoms, behind, {tuple(numbers[atom] for atom in walk(option, copies)[0]): option for option in found})
    rows = np.full((len(found), max(map(len, found))), -1, np.int64)
    for row, option in zip(rows, ordered, strict=True):
        row[: len(option)] = [numbers[atom] for atom in walk(option, copies)[0]]
    number = {option: place for place, option in enumerate(ordered)}
    plain = np.array([number[option] for option in found if options.is_uncompressed(option)], np.int64)
    devices = np.array([[device in options.devices_of((one.action,)) for device in DEVICES] for one in numbers])
    return Graph(ordered, number, rows, plain, tuple(numbers), devices, first, atoms, behind, before)


def _before(first: Ints, behind: Ints) -> Ints:
    """Of each edge, the number of paths through the same node's edges before it."""
    paths, before = np.ones(len(first) - 1, np.int64), np.zeros(len(behind), np.int64)
    for node in range(1, len(paths)):
        edges = slice(first[node], first[node + 1])
        through = paths[behind[edges]]
        before[edges], paths[node] = np.cumsum(through) - through, through.sum()
    return before


def _by_number(first: Ints, atom: Ints, behind: Ints, option_of: Mapping[tuple[int, ...], Option]) -> tuple[Option, ...]:
    """The options in the order of the edges that they take, which is that of their numbers."""

    def paths(node: int) -> Iterator[tuple[int, ...]]:
        if not node:
            yield ()
        for edge in range(first[node], first[node + 1]):
            for rest in paths(int(behind[edge])):
                yield int(atom[edge]), *rest

    return tuple(option_of[path] for path in paths(len(first) - 2))


@helper
def _keep_less(value: Any, chosen: Any, through: Any, step: Any) -> None:
    """Of each column's two, keep the less in ``value`` and leave the other in ``through``, infinity if they are alike. Without branches: it
    is most of a search's pricing, and so the compiler does several columns at once."""
    for column in range(value.size):
        old, new, old_step, new_step = value[column], through[column], chosen[column], step[column]
        less, alike = new < old * (1 - 1e-9), new <= old * (1 + 1e-9)
        value[column] = new if less else old
        chosen[column] = new_step if less else old_step
        through[column] = old if less else (np.inf if alike else new)
        step[column] = old_step if less else new_step


@kernel(types.void(_IN_I64, _IN_I64, _IN_I64, _IN_F64_2D, _OUT_F64_3D, _OUT_I64_3D))
def _shortest(first: Any, atom: Any, behind: Any, cost: Any, value: Any, chosen: Any) -> None:
    """value, chosen: by rank, node and column, the costs of the cheapest paths from a node, each more than the one before, and their first steps:
    edge * ranks + rank at the node behind it."""
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
    """Fill a ``OptionTable``. rows: every option's atoms; of_atom: every atom's tasks; held: each task's resource; times: of tasks (rows), by kind
    (columns)."""
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
    """numbers: by column and rank, the number of the option that was chosen, -1 where there is none."""
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
    """Which of the first so many resources (rows) tasks of these resources (columns) hold."""
    held = [[one in resources_of(resource) for resource in resources.tolist()] for one in range(rows)]
    return np.array(held, bool).reshape(rows, len(resources))


Priced = tuple[Task, ...]  # one task as each codec has it; they differ in what an element costs


class OptionTable(NamedTuple):
    """The tasks of some options for parts of several kinds, one after the other. first: where an option's tasks begin in ``resource`` and
    ``us`` [kind, option]; length: how many tasks each option has; rest: what a task and those behind it in its option take together."""

    first: Ints
    length: Ints
    resource: Ints
    us: F64
    rest: F64


class Space:
    """A problem's options, priced. Options are given by their numbers in the graph. may_take: by codec, the atoms that buckets of it can have;
    held: how many of RESOURCES, from the first on, occur in this job; threads: of each, how many tasks it does at once; moments_us: when each
    tensor is ready. Raises UsageError for constraints that leave no option."""

    def __init__(self, problem: Problem) -> None:
        self.codecs = problem.codecs
        self.threads, self.moments_us = problem.threads, problem.tensors.ready_us
        _ = problem.options  # raises where none is allowed
        self.graph = graph(problem.allowed, copies_of(problem.cluster))
        self.distinct: list[Priced] = []
        numbered = self._number(problem)
        most = max(1, *map(len, numbered))
        self.of_atom = np.array(
            [[*numbers, *[-1] * (most - len(numbers))] for numbers in (*numbered, [])], np.int64
        )  # the last: of no atom
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
        # how often each atom has each task on each resource, and in flight
        spent, in_flight = holds(self.resources, self.held), self.resources == IN_FLIGHT
        if in_flight.any():
            spent = np.concatenate([spent, in_flight[None]])
        self.uses = counts[:-1, :-1] * spent[:, None, :]

    def _number(self, problem: Problem) -> list[list[int]]:
        """Of each atom, its tasks as numbers of ``distinct``: equal work is the same whatever its action is called."""
        place: dict[Any, int] = {}
        found = []
        for atom in self.graph.atoms:
            numbers = []
            for task in zip(*[price(atom, problem.cluster, codec, problem.direct) for codec in self.codecs], strict=True):
                number = place.setdefault(task[0][1:] + tuple([each.per_element_us for each in task[1:]]), len(place))
                if number == len(self.distinct):
                    self.distinct.append(task)
                numbers.append(number)
            found.append(numbers)
        return found

    def _may_take(self, problem: Problem) -> NDArray[np.bool_]:
        """By codec, the atoms on devices that are left to it, of which it has times for every task."""
        takes = np.array([[device in problem.devices(codec) for device in DEVICES] for codec in self.codecs])
        has = self._curve >= 0
        has[[not task[0].curve for task in self.distinct]] = True
        has = np.append(has, np.ones((1, len(self.codecs)), bool), axis=0)
        every: NDArray[np.bool_] = np.logical_and.reduce(has[self.of_atom[:-1]], axis=1).T
        return ~(~takes @ self.graph.devices.T) & every

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
        """The options' tasks, a row each, as numbers of ``distinct``, with -1 between and after them."""
        return self.of_atom[self.graph.rows[numbers]].reshape(len(numbers), self.graph.rows.shape[1] * self.of_atom.shape[1])

    def table(self, numbers: Ints, sizes: F64, codec: Ints) -> OptionTable:
        """The options' tasks for parts of these sizes and codecs."""
        count = len(sizes) * int(self._count_of_atom[self.graph.rows[numbers]].sum())
        first, length = np.empty((len(sizes), len(numbers)), np.int64), np.empty(len(numbers), np.int64)
        table = OptionTable(first, length, np.empty(count, np.int64), np.empty(count), np.empty(count))
        _table(self.graph.rows, self.of_atom, numbers, self.resources, self.times(sizes, codec), *table)
        return table

    def times(self, numel: F64, codec: Ints) -> F64:
        """Microseconds of each distinct task (rows) for parts of these numbers of elements and codecs (columns). Tasks that a codec cannot
        have take none; whoever chooses asks ``may_take``."""
        times = np.empty((len(self.distinct), len(numel)))
        task_times(self.fixed_us, self._slope, self._curve, self._share, *self._curves, numel, codec, times)
        return times

    def least_times(self, numel: F64, codec: Ints) -> F64:
        """As ``times``, but of the quickest part with at least so many elements: a measured curve may fall."""
        times = np.empty((len(self.distinct), len(numel)))
        first, sizes, us = self._curves
        least = us.copy()
        for begin, end in pairwise(first.tolist()):
            least[begin:end] = np.minimum.accumulate(us[begin:end][::-1])[::-1]
        task_times(self.fixed_us, self._slope, self._curve, self._share, first, sizes, least, numel, codec, times)
        return times

    def least_us_per_element(self) -> F64:
        """What an element costs at least in each distinct task (rows), in buckets however large, by codec (columns)."""
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
        """Microseconds of each atom on each resource, and, where some are, in flight: [resource, atom, column of ``times``]."""
        found: F64 = self.uses @ times
        return found

    def shortest(self, costs: F64, ranks: int = 1) -> tuple[F64, Ints]:
        """The cheapest of all options for each column of atoms' costs, and the next ones that cost more, up to ``ranks`` of them: their costs
        (ranks, columns; inf where there is none), and their numbers (columns, ranks; -1 where there is none)."""
        columns, nodes = costs.shape[1], self.graph.first.size - 1
        value, chosen = np.empty((ranks, nodes, columns)), np.zeros((ranks, nodes, columns), np.int64)
        _shortest(self.graph.first, self.graph.atom, self.graph.behind, np.ascontiguousarray(costs), value, chosen)
        numbers = np.empty((columns, ranks), np.int64)
        _numbers(self.graph.before, self.graph.behind, value, chosen, numbers)
        return value[:, -1], numbers


def _curves(tasks: Sequence[Priced], codecs: Sequence[CodecCosts]) -> tuple[Ints, Curves]:
    """The number of each task's curve (rows) by codec (columns), -1 for none, and the curves."""
    numbers: dict[tuple[str, int], int] = {}
    found = np.full((len(tasks), len(codecs)), -1, np.int64)
    points: list[Points] = []
    for row, task in enumerate(tasks):
        for column, each in enumerate(task):
            if not each.curve:
                continue
            key = each.curve, column
            if key not in numbers:
                known = codecs[column].has(each)
                numbers[key] = len(points) if known else -1
                points += [codecs[column].points(each.curve)] if known else []
            found[row, column] = numbers[key]
    return found, curves_of(points)
