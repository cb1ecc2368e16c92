"""Payload bytes are the same whatever the processor, and whichever kernels NumPy, OpenBLAS and LLVM choose for it.

The long test runs all goldens, laws and schemes under each variant: ``python -m pytest -m long tests/codecs/test_variants.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parent / "golden" / "codecs"
NUMPY_PLAIN = {"NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", []))}
# name -> its environment, and what the processor must have for it
VARIANTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "numpy without vectors": (NUMPY_PLAIN, set()),
    "kernels for any processor": ({"NUMBA_CPU_NAME": "generic"}, set()),
    "kernels for haswell": ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2"}, {"avx2", "fma", "bmi2", "f16c"}),
    "openblas prescott": ({"OPENBLAS_CORETYPE": "Prescott"}, set()),
    "openblas sandybridge": ({"OPENBLAS_CORETYPE": "Sandybridge"}, {"avx"}),
    "openblas haswell": ({"OPENBLAS_CORETYPE": "Haswell"}, {"avx2", "fma"}),
    "openblas zen": ({"OPENBLAS_CORETYPE": "Zen"}, {"avx2", "fma"}),
    "openblas skylakex": ({"OPENBLAS_CORETYPE": "SkylakeX"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}
COMPARE = """
import runpy, sys
from pathlib import Path
folder = Path(sys.argv[1])
made = runpy.run_path(str(folder / "regenerate.py"))["golden_payloads"](sys.argv[2:])
print(len(made), [name for name, payload in made.items() if payload != (folder / name).read_bytes()])
"""


def processor() -> set[str]:
    """Features of this machine's, as Linux names them."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def run(arguments: list[str], variant: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error", **variant}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1500)  # kernels are compiled for a processor that they are not yet kept for
def test_goldens_hold_on_a_processor_without_any_vectors_or_half_floats() -> None:
    done = run(["-c", COMPARE, str(FOLDER), "fp16", "int8:ef=0", "onebit"], NUMPY_PLAIN | {"NUMBA_CPU_NAME": "generic"})
    assert (done.returncode, done.stdout.strip()) == (0, "6 []"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_goldens_laws_and_schemes_hold_under(name: str) -> None:
    variant, needed = VARIANTS[name]
    if needed - processor():
        pytest.skip(f"this processor lacks {', '.join(sorted(needed - processor()))}")
    files = [str(HERE / f"test_{what}.py") for what in ("golden", "schemes", "laws", "bits", "topk", "randomk", "rotation", "toy_problems")]
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", "--timeout", "3600", *files], variant)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
