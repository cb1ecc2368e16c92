"""Compiles every Triton kernel ahead for three generations of GPUs, without having one, and holds the result to rules.

    python tests/cuda/ahead.py              check up to 6 variants of each kernel, and that cuda/KERNELS.md says of them what was compiled
    python tests/cuda/ahead.py --write      write cuda/KERNELS.md
    python tests/cuda/ahead.py --every      check all variants; takes many minutes. The table is left alone, as it is under another Triton than its own
    ... --only lowrank --only write_kernel  the same for kernels with one of these in their module's or own name; the table's other rows stay

`tour.py` calls the GPU sides of all codecs; here, a launch is recorded with the types and constants of its arguments, and compiled. The rules:
every kernel and helper is reached by the tour; nothing spills registers or uses a stack; and no instruction may give other numbers than the CPU
does: ``INEXACT`` has them, `cuda/README.md` says what to write instead. `test_ahead.py` does so for a sample.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

TARGETS: Final = (80, 90, 100)  # compute capabilities: A100, H100 and H200, B200
TABLE: Final = Path(__file__).parents[2] / "cuda" / "KERNELS.md"
# Instructions of PTX that may give other numbers than the CPU or the interpreter, or others from run to run.
INEXACT: Final = re.compile(
    "|".join(
        (
            r"\b(?:fma|mad)\.\S*f(?:16|32|64)\S*",  # rounds once, where the CPU rounds twice
            r"\b(?:add|sub|mul)\.(?:sat\.)?b?f(?:16|32|64)\S*",  # says no rounding: the assembler may fuse it
            r"\S+\.ftz\S*",  # makes denormals zeros
            r"\S+\.approx\S*|\bdiv\.full\S*",
            r"\b(?:min|max)\.(?!NaN\.)(?:xorsign\.abs\.)?b?f(?:16|32|64)\S*",  # the limit where an element is NaN, which NumPy keeps
            r"\bcvt\.r[nzmp]i\.\S*[su](?:8|16|32|64)\.b?f(?:16|32|64)\S*",  # ends at the integer's limits, where NumPy does anything
            r"\bcvt\.r\S*(?:bf16|f16|e4m3|e5m2|tf32)\S*\.f(?:32|64)\b\S*",  # narrows with another NaN, and on some GPUs alone
            r"\b(?:mma|wgmma|tcgen05)\.\S+",  # sums in an order of its own
            r"\b(?:red|atom)\.\S*\.b?f(?:16|32|64)\S*",  # sums in any order
            r"\bld\.global\.nc\S*",  # may not see what the kernel has stored
        )
    )
)
RESOURCES: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
MOST_VARIANTS: Final = 6  # of a kernel, evenly among those that the tour launches
REMEDY: Final = "python tests/cuda/ahead.py --write"
POINTERS: Final = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint16: "*u16", torch.uint32: "*u32",
}  # fmt: skip
HEAD: Final = """# Resources of the kernels

Each kernel as Triton {triton} compiles it ahead: registers of a thread / bytes of shared memory of a program / bytes of stack and spilled registers. A row for
each of up to {variants} variants of a kernel: the arguments that differ between all of its variants, pointers by the type of their elements. `{remedy}`
writes it, and with `--only KERNEL` the rows of one kernel anew.

| kernel | variant | {targets} |
| --- | --- | {rule} |
"""


@dataclass(frozen=True)
class Launch:
    """What a kernel is compiled from. types: of its parameters, in order, as Triton writes them; tuples for tuples."""

    module: str
    kernel: str
    types: tuple[Any, ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Helper:
    """A helper that a kernel takes as a constant, by its name."""

    module: str
    name: str

    def found(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class Compiled:
    """What one launch takes on one target. wrong: the rules it breaks, empty if none."""

    launch: Launch
    target: int
    registers: int
    shared: int
    spilled: int
    wrong: str


def modules(package: str) -> list[ModuleType]:
    """Every module of a package."""
    root = importlib.import_module(package)
    return [importlib.import_module(found.name) for found in pkgutil.walk_packages(root.__path__, f"{package}.")]


def record(tour: str) -> list[Launch]:
    """Every different launch of the tour ("module:function"), none of which runs."""
    from triton.runtime.jit import JITFunction

    launches: dict[Launch, None] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **given: Any) -> None:
        launches[_described(kernel, arguments, given)] = None

    genuine, JITFunction.run = JITFunction.run, run
    try:
        module, _, function = tour.partition(":")
        getattr(importlib.import_module(module), function)()
    finally:
        JITFunction.run = genuine
    return list(launches)


def _described(kernel: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> Launch:
    bound = dict(zip(kernel.arg_names, arguments, strict=False)) | {name: given[name] for name in given if name in kernel.arg_names}
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    assert list(bound) and set(bound) == set(kernel.arg_names), f"{kernel.__name__}: {sorted(set(kernel.arg_names) - set(bound))} missing"
    constants: list[tuple[tuple[int, ...], Any]] = []
    types = []
    for place, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        types.append("constexpr" if parameter.is_constexpr else _type_of(value, (place,), constants))
        if parameter.is_constexpr:
            value = getattr(value, "value", value)
            constants.append(((place,), Helper(value.fn.__module__, value.__name__) if hasattr(value, "fn") else value))
    return Launch(kernel.fn.__module__, kernel.__name__, tuple(types), tuple(constants), tuple(sorted(options.items())))


def _type_of(value: Any, path: tuple[int, ...], constants: list[tuple[tuple[int, ...], Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        return tuple(_type_of(item, (*path, place), constants) for place, item in enumerate(value))
    if value is None:
        constants.append((path, None))
        return "constexpr"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel takes {type(value).__name__}, of which no type is known here: extend {Path(__file__).name}")


def compile_one(launch: Launch, target: int) -> Compiled:
    """Compile it for one target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    signature = dict(zip(kernel.arg_names, launch.types, strict=True))
    aligned = {path: [["tt.divisibility", 16]] for path in _pointers(launch.types)}
    constants = {path: value.found() if isinstance(value, Helper) else value for path, value in launch.constants}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(launch.options))
    except (CompilationError, RuntimeError) as error:
        return Compiled(launch, target, 0, 0, 0, f"does not compile: {error}")
    registers, stack, _, local = _resources(compiled.asm["cubin"])
    broken = [f"{stack + local} bytes of stack and spilled registers"] if stack + local else []
    broken += sorted(set(INEXACT.findall(compiled.asm["ptx"])))
    return Compiled(launch, target, registers, compiled.metadata.shared, stack + local, ", ".join(broken))


def _pointers(types: Iterable[Any], path: tuple[int, ...] = ()) -> Iterable[tuple[int, ...]]:
    for place, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from _pointers(kind, (*path, place))
        elif kind.startswith("*"):
            yield (*path, place)


def _resources(cubin: bytes) -> tuple[int, ...]:
    """Registers, stack, static shared memory and local memory, as the bundled cuobjdump reads them off the machine code."""
    import triton.backends.nvidia

    tool = Path(str(triton.backends.nvidia.__file__)).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = RESOURCES.search(done.stdout)
    assert found is not None, done.stdout
    return tuple(map(int, found.groups()))


def unreached(found: Iterable[ModuleType], launches: Iterable[Launch]) -> list[str]:
    """Kernels and helpers that no launch runs."""
    from triton.runtime.jit import JITFunction

    everything: dict[int, str] = {}
    for module in found:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                everything[id(value)] = f"{module.__name__}.{name}"
    waiting: list[Any] = []
    for launch in launches:
        waiting.append(getattr(importlib.import_module(launch.module), launch.kernel))
        waiting += [value.found() for _, value in launch.constants if isinstance(value, Helper)]
    while waiting:
        function = waiting.pop()
        if isinstance(function, JITFunction):
            everything.pop(id(function), None)
            waiting += [value for value in _named(function.fn) if id(value) in everything]
    return sorted(everything.values())


def _named(function: Any) -> Iterable[Any]:
    """What the names in a function stand for, also those behind a module's name and a dot."""
    scope, names = function.__globals__, function.__code__.co_names
    for name in names:
        value = scope.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (getattr(value, inner, None) for inner in names)


def spread(launches: list[Launch]) -> list[Launch]:
    """At most ``MOST_VARIANTS`` launches of each kernel, the first and the last among them."""
    of: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        of.setdefault((launch.module, launch.kernel), []).append(launch)
    chosen = []
    for variants in of.values():
        step = max(1.0, (len(variants) - 1) / (MOST_VARIANTS - 1))
        chosen += [variants[round(step * number)] for number in range(min(MOST_VARIANTS, len(variants)))]
    return chosen


def sample(launches: list[Launch]) -> list[tuple[Launch, int]]:
    """A variant of each kernel in the middle of those that the table has, and one target for it, in turn."""
    of: dict[tuple[str, str], list[Launch]] = {}
    for launch in spread(launches):
        of.setdefault((launch.module, launch.kernel), []).append(launch)
    return [(of[kernel][len(of[kernel]) // 2], TARGETS[place % len(TARGETS)]) for place, kernel in enumerate(sorted(of))]


def compile_all(launches: list[Launch]) -> list[Compiled]:
    """Every launch for every target, by as many processes as there are cores."""
    tasks = [(launch, target) for launch in launches for target in TARGETS]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*tasks, strict=True), chunksize=4)) if tasks else []


def names(launches: Iterable[Launch]) -> dict[Launch, str]:
    """The first two cells of each launch's row: its kernel, and what tells it from the kernel's other variants."""
    of: dict[str, list[Launch]] = {}
    for launch in launches:
        of.setdefault(f"`{launch.module.removeprefix('psgc.cuda.')}` {launch.kernel}", []).append(launch)
    found = {}
    for kernel, variants in of.items():
        told = [_told(launch) for launch in variants]
        differ = [key for key in told[0] if len({each[key] for each in told}) > 1]
        for launch, each in zip(variants, told, strict=True):
            found[launch] = f"| {kernel} | {', '.join(f'{key} {each[key]}' for key in differ)} |"
    return found


def _told(launch: Launch) -> dict[str, str]:
    """What is said of each argument, and of the number of warps."""
    kernel, constants = getattr(importlib.import_module(launch.module), launch.kernel), dict(launch.constants)
    told = {}
    for place, (name, kind) in enumerate(zip(kernel.arg_names, launch.types, strict=True)):
        value = constants.get((place,))
        if isinstance(kind, tuple):
            told[name] = f"{len(kind)} x {str(kind[0]).lstrip('*')}"
        elif kind == "constexpr":
            told[name] = value.name if isinstance(value, Helper) else str(value)
        else:
            told[name] = kind.lstrip("*")
    return told | {key: str(value) for key, value in launch.options}


def cell(one: Compiled) -> str:
    """What the table says of a compilation."""
    return f"{one.registers} / {one.shared} / {one.spilled}"


def rows_of(launches: Iterable[Launch], done: Iterable[Compiled]) -> dict[str, str]:
    """The table's row of each launch that was compiled for every target, by its first two cells."""
    cells: dict[Launch, dict[int, str]] = {}
    for one in done:
        cells.setdefault(one.launch, {})[one.target] = cell(one)
    name = names(launches)
    return {name[launch]: f"{name[launch]} {' | '.join(row[target] for target in TARGETS)} |" for launch, row in cells.items()}


def rows_in(path: Path) -> dict[str, str]:
    """The rows of a table that was written, likewise."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {line[: line.index("|", line.index("|", 1) + 1) + 1]: line for line in lines if line.startswith("| `")}


def is_of_this_triton(path: Path) -> bool:
    """Whether a table that was written is of the Triton that compiles here; others take other registers."""
    import triton

    return not path.is_file() or f"as Triton {triton.__version__} compiles" in path.read_text()


def text_of(rows: Iterable[str]) -> str:
    """The text of cuda/KERNELS.md."""
    import triton

    targets, rule = " | ".join(f"sm_{target}" for target in TARGETS), " | ".join("---" for _ in TARGETS)
    head = HEAD.format(triton=triton.__version__, variants=MOST_VARIANTS, remedy=REMEDY, targets=targets, rule=rule)
    return head + "".join(f"{row}\n" for row in sorted(rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel ahead for sm_80, sm_90 and sm_100, and check the result.")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--every", action="store_true", help="compile all variants of each kernel; the table is left alone")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="compile kernels with this in their name; may be repeated"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the table that is checked or written")
    parser.add_argument("--package", default="psgc.cuda", help="where the kernels are")
    parser.add_argument("--tour", default="tests.cuda.tour:tour", help="module:function that launches them all")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: what the interpreter runs cannot be compiled; unset it")
    if options.write and options.only and not is_of_this_triton(options.table):
        parser.error(f"{options.table.name} is of another Triton: write all of it, without --only, or install that one")
    launches = record(options.tour)
    named = [launch for launch in launches if not options.only or any(name in f"{launch.module}.{launch.kernel}" for name in options.only)]
    done = compile_all(named if options.every else spread(named))
    wrong = [
        f"{name}: no launch of {options.tour} runs it; call it there, or delete it"
        for name in unreached(modules(options.package), launches)
    ]
    for one in done:
        if one.wrong:
            wrong.append(f"{one.launch.module}.{one.launch.kernel} {one.launch.types} for sm_{one.target}: {one.wrong}")
    rows, written, name = rows_of(launches, done), rows_in(options.table), names(launches)
    current = {name[launch] for launch in spread(launches)}
    if options.every or not (is_of_this_triton(options.table) or options.write):
        pass
    elif options.write:
        options.table.write_text(text_of(({cells: row for cells, row in written.items() if cells in current} | rows).values()))
    else:
        wrong += [f"{options.table.name}: write this row anew, {REMEDY}: {row}" for cells, row in rows.items() if written.get(cells) != row]
        wrong += [f"{options.table.name}: no kernel has this row any more, {REMEDY}: {cells}" for cells in written if cells not in current]
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    most = max((one.registers for one in done), default=0)
    sys.stdout.write(
        f"{len(done)} compilations of {len(rows)} of {len(launches)} variants, at most {most} registers; {len(wrong)} broken rules\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.cuda.tour
    sys.exit(main())
