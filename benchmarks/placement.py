"""How evenly parts lie on servers, on worker machines and on machines of their own: psgc's placement beside BytePS's hash functions.

    python benchmarks/placement.py                     # n = 2 to 32 worker machines, k = 0 to n others, seven models; half an hour on an idle core
    python benchmarks/placement.py --nodes 8 32 --models vgg16

Nothing is measured: ``psgc/reproduce/exchange.py`` simulates the exchanges and says what bytes and time are. A time is divided by that of an exchange of
parts as large as psgc's largest, of which each server always has its best share.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from psgc.reproduce.exchange import bytes_over_optimum, declared, exchange_s, machines_of, placed_by_byteps, placed_by_psgc, spread_ideally

MODELS: Final = ("vgg16", "resnet50", "resnet101", "bert-base", "gpt2", "lstm", "llama-1b")


class Cell(NamedTuple):
    """One job, and for each placement: bytes and time over the best."""

    model: str
    nodes: int
    apart: int
    bytes: dict[str, float]
    time: dict[str, float]


def examine(model: str, nodes: int, apart: int, functions: Sequence[str] = ("djb2", "mixed")) -> Cell:
    """psgc's placement beside BytePS's functions."""
    declaration, machines = declared(model), machines_of(nodes, apart)
    ways = {"psgc": placed_by_psgc(declaration, machines)}
    ways |= {function: placed_by_byteps(declaration, machines, function) for function in functions}
    best = exchange_s(spread_ideally(ways["psgc"], machines), machines)
    return Cell(
        model, nodes, apart, {name: bytes_over_optimum(parts, machines) for name, parts in ways.items()},
        {name: exchange_s(parts, machines) / best for name, parts in ways.items()},
    )  # fmt: skip


def _rows(cells: Iterable[Cell]) -> Iterator[str]:
    """A line for each model: the worst of each placement."""
    for model, its in itertools.groupby(cells, lambda cell: cell.model):
        of_model = list(its)
        columns = [max(getattr(cell, what)[name] for cell in of_model) for name in of_model[0].bytes for what in ("bytes", "time")]
        yield f"| {model} | {len(of_model)} | " + " | ".join(f"{value:.3f}" for value in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=list(range(2, 33)), help="worker machines")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--functions", nargs="*", default=["djb2", "mixed"], help="BytePS's hash functions")
    arguments = parser.parse_args()
    cells = []
    names = ["psgc", *arguments.functions]
    print("| model | jobs | " + " | ".join(f"{name}, {what}" for name in names for what in ("bytes", "time")) + " |")
    print("|---" * (2 + 2 * len(names)) + "|")
    for model in arguments.models:
        jobs = [(nodes, apart) for nodes in arguments.nodes for apart in range(nodes + 1)]
        cells += (mine := [examine(model, nodes, apart, arguments.functions) for nodes, apart in jobs])
        print("\n".join(_rows(mine)), flush=True)
    for name in names:
        for what in ("bytes", "time"):
            worst = max(cells, key=lambda cell: float(getattr(cell, what)[name]))
            where = f"{worst.model}, n = {worst.nodes}, k = {worst.apart}"
            print(f"{name}, {what}: at worst {getattr(worst, what)[name]:.3f} of the best ({where})")


if __name__ == "__main__":
    main()
