"""Each kernel, compiled ahead for one of the three architectures, keeps the rules of `ahead.py`. It needs no GPU, and runs beside the interpreter: in a process
of its own, for what the interpreter runs cannot be compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.ahead import INEXACT, is_of_this_triton

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
    if one.wrong or (ahead.is_of_this_triton(ahead.TABLE) and cell != [ahead.cell(one)]):
        wrong.append(f"{names[launch]} sm_{target}: {one.wrong or ahead.cell(one)}, in the table {cell}")
print("\\n".join(wrong))
"""

REFUSED = (
    "fma.rn.f32", "fma.rn.f64", "mad.f32", "add.f32", "sub.f64", "mul.f32", "add.sat.f32", "mul.bf16", "add.rn.ftz.f32", "cvt.ftz.f32.f16",
    "div.full.f32", "div.approx.f32", "sqrt.approx.f32", "rcp.approx.ftz.f64", "ex2.approx.f32", "min.f32", "max.f64", "max.bf16",
    "min.xorsign.abs.f32", "cvt.rzi.s32.f32", "cvt.rni.u64.f64", "cvt.rzi.sat.s8.f32", "cvt.rn.bf16.f32", "cvt.rn.f16.f32",
    "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.bf16x2.f32", "cvt.rna.tf32.f32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "wgmma.mma_async.sync", "atom.global.gpu.acq_rel.add.f32", "red.relaxed.gpu.global.add.f64", "ld.global.nc.b32",
)  # fmt: skip
ALLOWED = (
    "add.rn.f32", "sub.rn.f64", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f64", "min.NaN.f32", "min.s32", "max.u64", "cvt.rn.f32.s32",
    "cvt.f64.f32", "cvt.rn.f32.f64", "cvt.f32.f16", "cvt.rmi.f32.f32", "cvt.u16.u32", "mad.lo.s32", "add.s32", "mul.wide.u32",
    "atom.global.gpu.acq_rel.add.s64", "atom.shared.add.u32", "ld.global.b32", "setp.gt.f32", "selp.f32", "abs.f32", "neg.f32",
)  # fmt: skip


def test_instructions_that_may_give_other_numbers_than_the_cpu_are_refused_and_no_others() -> None:
    assert [line for line in REFUSED if not INEXACT.search(f"{line} %r1, %r2;")] == []
    assert [line for line in ALLOWED if INEXACT.search(f"{line} %r1, %r2;")] == []


def test_a_table_of_another_triton_is_told_from_one_of_this(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[gpu-dev]'")
    assert is_of_this_triton(tmp_path / "none.md")
    for version, same in ((triton.__version__, True), ("3.0.99", False)):
        (tmp_path / "table.md").write_text(f"Each kernel as Triton {version} compiles it ahead")
        assert is_of_this_triton(tmp_path / "table.md") is same


def test_each_kernel_compiles_for_an_architecture_within_the_rules_and_as_the_table_says() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install -e '.[gpu-dev]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SAMPLE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), done.stdout
