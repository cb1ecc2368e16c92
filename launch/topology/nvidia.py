"""Reads what ``nvidia-smi`` prints: its list of GPUs, and ``topo -m``'s table of paths. Pure; text of others is taken with care."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import Final

from psgc.errors import UsageError
from psgc.launch.topology.machine import PATHS, Gpu

QUERY: Final = ("index", "name", "pci.bus_id", "pcie.link.gen.max", "pcie.link.width.max", "uuid")
MOST_GPUS: Final = 64
MOST_TEXT: Final = 1 << 20  # characters
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_BUS: Final = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")
_CELL: Final = re.compile(r"NV\d{1,2}$")
_DEVICE: Final = re.compile(r"[A-Za-z][\w.\-]{0,40}$")


def read_gpus(text: str) -> tuple[Gpu, ...]:
    """``nvidia-smi --query-gpu=index,name,... --format=csv,noheader`` with the fields of QUERY. Raises UsageError naming the line."""
    gpus = []
    for line in _lines(text):
        (row,) = csv.reader([line], skipinitialspace=True)
        if len(row) != len(QUERY) or not row[0].strip().isdigit() or (bus := normal_bus(row[2])) is None:
            raise UsageError(
                f"nvidia-smi --query-gpu: expected {', '.join(QUERY)}, got {line!r:.100}; psgc cannot tell this machine's GPUs"
            )
        generation, lanes = (int(field) if field.strip().isdigit() else 0 for field in row[3:5])
        uuid = row[5].strip() if row[5].startswith("GPU-") else ""
        gpus.append(Gpu(int(row[0]), row[1].strip()[:80], bus, generation=generation, lanes=lanes, uuid=uuid[:80]))
    if len(gpus) > MOST_GPUS or len({gpu.index for gpu in gpus}) < len(gpus) or len({gpu.bus for gpu in gpus}) < len(gpus):
        raise UsageError(
            f"nvidia-smi --query-gpu: {len(gpus)} GPUs, some of them twice or more than {MOST_GPUS}; psgc cannot tell this machine's GPUs"
        )
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def normal_bus(text: str) -> str | None:
    """A PCI address as Linux writes it, or None: nvidia-smi has eight digits of domain."""
    found = _BUS.match(text.strip())
    return None if found is None else f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}".lower()


def read_paths(text: str) -> dict[tuple[str, str], str]:
    """``nvidia-smi topo -m``: the path between each two devices, interfaces by their RDMA names where the table has a legend of them. Raises UsageError
    saying which line is not what it expects."""
    lines = _lines(text)
    head = next((at for at, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and not _is_row(line)), None)
    if head is None:
        raise _odd("a line of device names that begins with GPU0", lines[0] if lines else "nothing")
    names = [word for word in lines[head].partition("CPU Affinity")[0].split() if _DEVICE.match(word)]
    if len(set(names)) < len(names):
        raise _odd("each device once", lines[head])
    cells: dict[tuple[str, str], str] = {}
    rows = []
    for line in lines[head + 1 :]:
        name, *words = line.split()
        if name not in names:
            break
        for other, cell in zip(names, words, strict=False):
            if cell not in PATHS and not _CELL.match(cell):
                raise _odd(f"a path ({', '.join(PATHS)}, NV1, ...) from {name} to {other}", cell)
            cells[name, other] = cell
        if len(words) < len(names) or name in rows:
            raise _odd(f"one row of {len(names)} paths for {name}", line)
        rows.append(name)
    if rows != names:
        raise _odd(f"a row for each of {', '.join(names)}", f"rows for {', '.join(rows) or 'none'}")
    for (one, other), cell in cells.items():
        if cells[other, one] != cell or (cell == "X") != (one == other):
            raise _odd(f"the same path from {other} to {one} as back", f"{cells[other, one]} and {cell}")
    legend = _legend(lines)
    return {(legend.get(one, one), legend.get(other, other)): cell for (one, other), cell in cells.items()}


def _is_row(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and (words[1] in PATHS or _CELL.match(words[1]) is not None)


def _legend(lines: list[str]) -> Mapping[str, str]:
    """``NIC0: mlx5_0`` at the table's end."""
    found = (re.match(r"\s*(NIC\d+):\s*(\S+)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match and _DEVICE.match(match[2])}


def _lines(text: str) -> list[str]:
    return [line for line in _COLOUR.sub("", text[:MOST_TEXT]).splitlines() if line.strip()]


def _odd(wanted: str, came: str) -> UsageError:
    return UsageError(f"nvidia-smi topo -m: expected {wanted}, got {came!r:.100}; psgc goes by the PCI tree alone")
