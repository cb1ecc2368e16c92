"""``python -m psgc`` is the command line."""

from __future__ import annotations

import subprocess
import sys


def test_python_m_psgc_is_psgc() -> None:
    found = subprocess.run([sys.executable, "-m", "psgc", "doctor", "--no-such-option"], check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith("psgc") and "--no-such-option" in found.stderr and found.stderr.count("\n") == 1
