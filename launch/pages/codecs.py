"""``python -m psgc.launch.pages.codecs docs/codecs.md``: rewrites the page's generated sections, between their markers.

python -m psgc.launch.pages.codecs docs/codecs.md             ratios, errors and ids; a test compares them with the page
python -m psgc.launch.pages.codecs docs/codecs.md --speeds    also the speeds, measured on this machine (some minutes)
python -m psgc.launch.pages.codecs --figures                  measure payload sizes and errors anew, and rewrite psgc/codecs/figures.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psgc.codecs import BucketContext, figures, parse_scheme, registered_codecs, registered_schemes
from psgc.codecs.catalogue import catalogue, measured_figures
from psgc.codecs.table import ROWS
from psgc.errors import CodecError
from psgc.launch.bench.kernels import SIZES, bench_kernels
from psgc.launch.bench.tables import Table, bytes_text, ratio_table, time_table

SPEEDS_COMMAND: Final = "python -m psgc.launch.pages.codecs docs/codecs.md --speeds"


def codec_table(entries: list[dict[str, Any]]) -> Table:
    """Every codec's compression ratios, properties and errors."""
    header = ["codec", "parameters", "over fp32", "over bf16", "unbiased", "residual", "additive", "NMSE, Gaussian", "NMSE, heavy tails"]
    rows = [
        [
            _name(entry), ", ".join(f"{k}={v}" for k, v in entry["parameters"].items()), f"{entry['ratio_fp32']:.3g}x",
            f"{entry['ratio_bf16']:.3g}x", _when(entry, "unbiased"), _when(entry, "feedback"), "yes" if entry["additive"] else "no",
            nmse_text(entry["nmse_gaussian"]), nmse_text(entry["nmse_heavy"]),
        ]
        for entry in entries
    ]  # fmt: skip
    return header, rows


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['canonical']} ({entry['distribution']})" if "distribution" in entry else str(entry["canonical"])


def advice_table(entries: list[dict[str, Any]]) -> Table:
    """When to use which."""
    return ["codec", "for"], [[entry["canonical"], entry["advice"]] for entry in entries]


def terminal_tables(entries: list[dict[str, Any]]) -> tuple[Table, Table]:
    """The same for terminals of 80 columns: what codecs save and lose, then their parameters and when to use which."""
    header, rows = codec_table(entries)
    place = header.index("parameters")
    figures = [*header[:place], *header[place + 1 :]], [[*row[:place], *row[place + 1 :]] for row in rows]
    advice = [[row[0], row[place], entry["advice"]] for row, entry in zip(rows, entries, strict=True)]
    return figures, (["codec", "parameters", "for"], advice)


def _when(entry: dict[str, Any], what: str) -> str:
    """Whether a codec has the property, or the value of ``ef`` that gives it."""
    for ef in ("0", "1"):
        if "ef" in entry["parameters"] and entry["parameters"]["ef"] != ef and not entry[what]:
            try:
                other = parse_scheme(f"{entry['name']}:ef={ef}", BucketContext())
            except CodecError:
                return "no"
            return f"with ef={ef}" if getattr(other, what) else "no"
    return "yes" if entry[what] else "no"


def nmse_text(value: float) -> str:
    """Two digits."""
    return "0" if value == 0 else f"{value:.2g}" if value >= 0.01 else f"{value:.1e}".replace("e-0", "e-")


def markdown(table: Table) -> str:
    """A table with its first column as code."""
    header, rows = table
    lines = [header, ["---"] * len(header), *([f"`{first}`", *rest] for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render_codecs(entries: list[dict[str, Any]]) -> str:
    """The section `codecs`."""
    return f"{markdown(codec_table(entries))}\n\n{markdown(advice_table(entries))}"


def render_ids() -> str:
    """The section `ids`: psgc.codecs.table."""
    rows = [
        [
            str(row.codec_id),
            f"`{row.text}`" if not row.inner else row.text,
            f"reserved: `{row.retired}` writes these bytes" if row.retired else "",
        ]
        for row in sorted(ROWS, key=lambda row: row.codec_id)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [["id", "payload of", ""], ["---"] * 3, *rows])


def render_speeds(result: dict[str, Any]) -> str:
    """The section `speeds`."""
    largest = bytes_text(4 * max(row["numel"] for row in result["codecs"]))
    without = "".join(f" Without {implementation}: {why}." for implementation, why in result["left_out"].items())
    return (
        f"{result['machine']}; measured by `{SPEEDS_COMMAND}`.{without}\n\n"
        f"Times memcpy's speed, {largest} of fp32 (memcpy: {result['memcpy_gbps']:.2f} GB/s):\n\n{markdown(ratio_table(result))}\n\n"
        f"Nanoseconds an element, by bytes of fp32:\n\n{markdown(time_table(result))}"
    )


def render_figures(measured: Mapping[str, tuple[float, float, float]]) -> str:
    """The file psgc/codecs/figures.py."""
    rows = "".join(f'    "{name}": ({", ".join(map(repr, figures))}),\n' for name, figures in measured.items())
    return (
        '"""What psgc\'s own codecs save and lose at their default parameters: see ``catalogue.Figures``.\n\n'
        "Measured by ``python -m psgc.launch.pages.codecs --figures``, which rewrites this file; a test measures them again.\n"
        '"""\n\nfrom __future__ import annotations\n\nfrom typing import Final\n\n'
        f"FIGURES: Final[dict[str, tuple[float, float, float]]] = {{\n{rows}}}\n"
    )


def section(page: str, name: str) -> str:
    """The text between a section's markers."""
    return _between(name).search(page)[2]  # type: ignore[index]


def with_section(page: str, name: str, text: str) -> str:
    """The page with another text between a section's markers."""
    return _between(name).sub(lambda match: f"{match[1]}{text}{match[3]}", page)


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- generated: {name} -->\n\n)(.*?)(\n\n<!-- end: {name} -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Rewrite the page, or the figures; exit status."""
    if arguments == ["--figures"]:
        Path(figures.__file__).write_text(render_figures(measured_figures()))  # a shell's > would empty the file that this module imports
        return 0
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--speeds"]):
        sys.stderr.write(f"usage: {SPEEDS_COMMAND.replace('--speeds', '[--speeds]')}\n")
        return 2
    path = Path(arguments[0])
    page = with_section(path.read_text(), "codecs", render_codecs(catalogue()))
    page = with_section(page, "ids", render_ids())
    if arguments[1:]:
        names = [*registered_codecs(), *registered_schemes()]
        page = with_section(page, "speeds", render_speeds(bench_kernels(SIZES, names, progress=lambda text: print(text, file=sys.stderr))))
    path.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
