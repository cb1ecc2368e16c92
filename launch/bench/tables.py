"""The tables of a kernel bench, for terminals and for pages: cells of text, made from the document that ``kernels.bench_kernels`` returns."""

from __future__ import annotations

from typing import Any, Final

Table = tuple[list[str], list[list[str]]]  # header, rows
OPS: Final = ("encode", "decode", "server")


def ratio_table(result: dict[str, Any]) -> Table:
    """Times memcpy's speed at the largest size: psgc's, and, where there are any, the baselines beside it."""
    rows, largest = result["codecs"], max(row["numel"] for row in result["codecs"])
    beside = [i for i in dict.fromkeys(row["implementation"] for row in rows) if i != "psgc"]
    cells = {(r["codec"], r["op"], r["implementation"]): f"{r['ratio_to_memcpy']:.2f}" for r in rows if r["numel"] == largest}
    columns = [(op, implementation) for op in OPS for implementation in ("psgc", *(beside if op != "server" else ()))]
    header = ["codec", *(op if implementation == "psgc" else implementation for op, implementation in columns)]
    return header, [[codec, *(cells.get((codec, *column), "") for column in columns)] for codec in _codecs(result)]


def time_table(result: dict[str, Any]) -> Table:
    """psgc's nanoseconds an element at every size."""
    rows = [row for row in result["codecs"] if row["implementation"] == "psgc"]
    cells = {(row["codec"], row["op"], row["numel"]): f"{row['ns_per_element']:.3g}" for row in rows}
    columns = [(op, numel) for op in OPS for numel in sorted({row["numel"] for row in rows})]
    header = ["codec", *(f"{op} {bytes_text(4 * numel)}" for op, numel in columns)]
    return header, [[codec, *(cells.get((codec, *column), "") for column in columns)] for codec in _codecs(result)]


def bytes_text(nbytes: int) -> str:
    """The size as text, in MB, KB or B, whichever is the largest unit that is not larger than the size."""
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def _codecs(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["codec"] for row in result["codecs"]))
