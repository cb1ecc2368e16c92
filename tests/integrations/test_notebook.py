"""The tour as a notebook: it runs from its first cell to its last, and its charts are drawn."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
WAIT_S = 280


def notebook() -> Any:
    return json.loads((EXAMPLES / "tour.ipynb").read_text())


def test_the_notebook_is_kept_without_what_a_run_has_printed() -> None:
    for cell in notebook()["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.integrations
@pytest.mark.timeout(900)
def test_every_cell_of_the_tour_runs_and_the_charts_are_drawn(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are not installed: make test-integrations does so")
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed: make test-integrations does so")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed: make test-integrations does so")
    book = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    (given,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
    given.source = f"from pathlib import Path\nsteps, link_mbit, out = 4, 100.0, Path({str(tmp_path)!r})"
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=WAIT_S, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    charts = [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    assert len(charts) == 3 and min(map(len, charts)) > 5_000, "bandwidths, lanes, and the training"
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "against bf16" in printed
    (table,) = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert all(f"<td>{codec}</td>" in table for codec in ("none", "int8", "onebit"))
    assert (tmp_path / "plan.html").stat().st_size > 1000
