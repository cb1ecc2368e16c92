"""The options of a bucket, as lists of actions: those of Espresso's decision tree, and those over servers.

An option says whether, where and how often a bucket is encoded, which collectives carry it, and at which level. The tree is that of
Espresso (Wang et al., EuroSys 2023, section 4.2, figure 8 and table 3), written as a grammar, C an encode and D a decode, each on GPU or CPU:

    first step of two, raw          Comm1   reduce_scatter | reduce
    second step of two              Comm2   all_gather after reduce_scatter | all_to_all, broadcast after reduce | gather
    in one step                     Comm    all_reduce; of payloads all_gather

    T1 (a second step, input raw)                     Comm2 | C Comm2c D
    T2 (the same, input encoded)                      Comm2c D | D T1
    T5 (second step between nodes, then within, raw)  Comm2 T1 | C Comm2c T2
    T3 (between nodes, then within, raw)              Comm T1 | Comm1 T5
    T4 (the same, input encoded)                      Commc T2 | Comm1c Comm2c T2 | Comm1c D T5
    flat                                              Comm | Comm1 T1 | C Commc D | C Comm1c T2
    hierarchical                                      Comm1 T3 | Comm1 C T4 | C Comm1c T4 | C Comm1c D T3 | C Comm1c D C T4

Owns the grammar and the actions' names: ``comp@gpu``, ``decomp@cpu``, ``LEVEL.OP`` for floats and ``LEVEL.OP.c`` for payloads, LEVEL one
of flat, intra (within a node) and inter (between nodes). ``costs`` says what actions cost, and ``psgc.program`` what they do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

Option = tuple[str, ...]
DEVICES: Final = ("gpu", "cpu")
# the collective that completes a sum whose first step is the key
_SECOND: Final = {"reduce_scatter": "all_gather", "all_to_all": "all_gather", "reduce": "broadcast", "gather": "broadcast"}
_FIRST_RAW: Final = ("reduce_scatter", "reduce")
_FIRST_ENCODED: Final = ("all_to_all", "gather")
# The options over servers that jobs always can run: uncompressed, and encoded on the CPU.
OVER_SERVERS: Final[tuple[Option, Option]] = (("flat.push", "flat.pull"), ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu"))


@dataclass(frozen=True, slots=True)
class Constraints:
    """The user's constraints on a plan's options.

    devices:       where encoding and decoding may happen.
    most_encodes:  how often a bucket may be encoded, since each encoding costs accuracy; None: any number.
    runtime:       plan for a job: parts are cut as jobs cut them, encoded where jobs encode, and collectives cost what they do there.
    among_workers: allow options in which ranks exchange among themselves, not only those in which every rank pushes all to servers. The job decides this,
                   not the user.
    on_gpus:       with ``runtime``, allow encoding on GPUs, too. The job decides this, not the user.
    codecs:        pairs of a pattern of tensor names and the only codec of the tensors that match it; the first match counts."""

    devices: tuple[str, ...] = DEVICES
    most_encodes: int | None = None
    flat: bool = True
    hierarchical: bool = True
    servers: bool = False
    runtime: bool = False
    among_workers: bool = True
    on_gpus: bool = False
    codecs: tuple[tuple[str, str], ...] = ()

    @property
    def encoders(self) -> tuple[str, ...]:
        """The allowed devices that may encode; with ``runtime`` only those that jobs encode on."""
        return tuple(device for device in self.devices if not self.runtime or self.on_gpus or device == "cpu")

    @property
    def to_be_run(self) -> bool:
        """Whether jobs of this version can run every allowed option; parts are then cut as jobs cut them."""
        return self.runtime or self.devices == ("cpu",)

    def allows(self, option: Option) -> bool:
        """Whether the constraints allow the option."""
        levels = levels_of(option)
        return (
            devices_of(option) <= set(self.encoders)
            and (self.most_encodes is None or encodes(option) <= self.most_encodes)
            and (self.flat or "flat" not in levels)
            and (self.hierarchical or levels <= {"flat"})
            and (self.servers or over_groups(option))
            and (self.among_workers or not is_program(option))
        )


@functools.cache
def encodes(option: Option) -> int:
    """How often the option encodes."""
    return sum(action.startswith("comp@") for action in option)


@functools.cache
def levels_of(option: Option) -> frozenset[str]:
    """The levels of the option's collectives, pushes and pulls."""
    return frozenset(action.partition(".")[0] for action in option if "." in action)


@functools.cache
def devices_of(option: Option) -> frozenset[str]:
    """The devices that encode or decode in the option."""
    return frozenset(action.partition("@")[2] for action in option if "@" in action)


class _Tree:
    """The grammar over some devices. Each method gives the options of one rule; its arguments name the second steps that are still to come."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.C = [(f"comp@{device}",) for device in devices]
        self.D = [(f"decomp@{device}",) for device in devices]

    def t1(self, level: str, second: str) -> list[Option]:
        raw, encoded = [(f"{level}.{second}",)], [(f"{level}.{second}.c",)]
        return [*raw, *joined(self.C, encoded, self.D)]

    def t2(self, level: str, second: str) -> list[Option]:
        return [*joined([(f"{level}.{second}.c",)], self.D), *joined(self.D, self.t1(level, second))]

    def t5(self, inter: str, intra: str) -> list[Option]:
        raw, encoded = [(f"inter.{inter}",)], [(f"inter.{inter}.c",)]
        return [*joined(raw, self.t1("intra", intra)), *joined(self.C, encoded, self.t2("intra", intra))]

    def t3(self, intra: str) -> list[Option]:
        options = joined([("inter.all_reduce",)], self.t1("intra", intra))
        for first in _FIRST_RAW:
            options += joined([(f"inter.{first}",)], self.t5(_SECOND[first], intra))
        return options

    def t4(self, intra: str) -> list[Option]:
        options = joined([("inter.all_gather.c",)], self.t2("intra", intra))
        for first in _FIRST_ENCODED:
            step, second = [(f"inter.{first}.c",)], _SECOND[first]
            options += joined(step, [(f"inter.{second}.c",)], self.t2("intra", intra))
            options += joined(step, self.D, self.t5(second, intra))
        return options

    def flat(self) -> list[Option]:
        options: list[Option] = [("flat.all_reduce",)]
        for first in _FIRST_RAW:
            options += joined([(f"flat.{first}",)], self.t1("flat", _SECOND[first]))
        options += joined(self.C, [("flat.all_gather.c",)], self.D)
        for first in _FIRST_ENCODED:
            options += joined(self.C, [(f"flat.{first}.c",)], self.t2("flat", _SECOND[first]))
        return options

    def hierarchical(self) -> list[Option]:
        options: list[Option] = []
        for first in _FIRST_RAW:
            step: list[Option] = [(f"intra.{first}",)]
            second = _SECOND[first]
            options += joined(step, self.t3(second))
            options += joined(step, self.C, self.t4(second))
        for first in _FIRST_ENCODED:
            step, second = joined(self.C, [(f"intra.{first}.c",)]), _SECOND[first]
            options += joined(step, self.t4(second))
            options += joined(step, self.D, self.t3(second))
            options += joined(step, self.D, self.C, self.t4(second))
        return options

    def servers(self) -> list[Option]:
        """Options in which servers sum: the contributions of all ranks, or each node's sum, pushed by one rank or shard by shard by all."""
        plain, encoded = ("push", "pull"), ("push.c", "pull.c")
        options: list[Option] = []
        for level, before, after in (
            ("flat", (), ()),
            ("inter", ("intra.reduce_scatter",), ("intra.all_gather",)),
            ("inter", ("intra.reduce",), ("intra.broadcast",)),
        ):
            options.append((*before, *(f"{level}.{step}" for step in plain), *after))
            steps = [tuple(f"{level}.{step}" for step in encoded)]
            options += joined([before], self.C, steps, self.D, [after])
        return options


def joined(*parts: Sequence[Option]) -> list[Option]:
    """Every concatenation of one option of each part."""
    return [sum(chosen, ()) for chosen in product(*parts)]


@functools.cache
def all_options(devices: tuple[str, ...] = DEVICES) -> tuple[Option, ...]:
    """The tree's options: 4341 with GPU and CPU, 174 with one of them."""
    tree = _Tree(devices)
    return (*tree.flat(), *tree.hierarchical())


@functools.cache
def server_options(devices: tuple[str, ...] = DEVICES) -> tuple[Option, ...]:
    """The options over servers, which are not among the tree's."""
    return tuple(_Tree(devices).servers())


@functools.cache
def constrained(constraints: Constraints) -> tuple[Option, ...]:
    """The options that the constraints allow, those over servers last."""
    devices = tuple(device for device in DEVICES if device in constraints.devices)
    every = (*all_options(devices), *server_options(devices)) if constraints.servers else all_options(devices)
    return tuple(option for option in every if constraints.allows(option))


def subtree_sizes(devices: tuple[str, ...] = DEVICES) -> dict[str, int]:
    """The number of options of each rule, after one given first step."""
    tree = _Tree(devices)
    return {
        "T1": len(tree.t1("intra", "all_gather")), "T2": len(tree.t2("intra", "all_gather")), "T3": len(tree.t3("all_gather")),
        "T4": len(tree.t4("all_gather")), "T5": len(tree.t5("all_gather", "all_gather")),
    }  # fmt: skip


@functools.cache
def over_groups(option: Option) -> bool:
    """Whether workers aggregate among themselves, without servers."""
    return not any(action.partition(".")[2].startswith(("push", "pull")) for action in option)


@functools.cache
def is_program(option: Option) -> bool:
    """Whether jobs run the option as a program over groups of ranks, with or without servers: every option except those in which each rank
    pushes its whole gradient."""
    return not any(action.startswith(("flat.push", "flat.pull")) for action in option)


def is_uncompressed(option: Option) -> bool:
    return encodes(option) == 0


def known_actions() -> frozenset[str]:
    """Every action that an option may hold."""
    return frozenset(action for option in (*all_options(), *server_options()) for action in option)


def unknown_actions(option: Iterable[str]) -> list[str]:
    """The actions that no option holds."""
    known = known_actions()
    return [action for action in option if action not in known]
