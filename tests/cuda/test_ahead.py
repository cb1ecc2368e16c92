"""Each kernel, compiled ahead for one of the three architectures, keeps the rules of `ahead.py`. It needs no GPU, and runs beside the interpreter: in a process
of its own, for what the interpreter runs cannot be compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = """
from tests.cuda import ahead
launches = ahead.record("tests.cuda.tour:tour")
wrong = ahead.unreached(ahead.modules("psgc.cuda"), launches)
names, written = ahead.names(launches), ahead.rows_in(ahead.TABLE)
wrong += sorted({names[launch] for launch in ahead.spread(launches)} ^ set(written))
for launch, target in ahead.sample(launches):
    one = ahead.compile_one(launch, target)
    cell = written.get(names[launch], "").rstrip(" |").split(" | ")[2 + ahead.TARGETS.index(target) :][:1]
    if one.wrong or cell != [ahead.cell(one)]:
        wrong.append(f"{names[launch]} sm_{target}: {one.wrong or ahead.cell(one)}, in the table {cell}")
print("\\n".join(wrong))
"""


def test_each_kernel_compiles_for_an_architecture_within_the_rules_and_as_the_table_says() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install -e '.[gpu-dev]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SAMPLE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), done.stdout
