"""The package ``psgc-byteps``: it installs the name ``byteps`` and ``bpslaunch``, and nothing where BytePS itself is installed."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import psgc

ROOT = Path(__file__).parent.parent.parent
PROJECT = ROOT / "compat" / "byteps"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder that BytePS 0.2.5 is installed in."""
    (tmp_path / "site" / "byteps-0.2.5.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "byteps-0.2.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: byteps\nVersion: 0.2.5\n")
    return tmp_path / "site"


def test_a_built_wheel_is_byteps_and_bpslaunch(tmp_path: Path, theirs: Path) -> None:
    shutil.copytree(ROOT / "psgc" / "compat", tmp_path / "psgc" / "compat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "psgc" / "__init__.py", tmp_path / "psgc")
    shutil.copytree(PROJECT, tmp_path / "compat" / "byteps", symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(tmp_path / "compat" / "byteps"),
    ]
    subprocess.run(build, check=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("psgc_byteps-*.whl")))
    packed = {name for name in wheel.namelist() if name.startswith("byteps/")}
    assert packed == {str(path.relative_to(FOLDER)) for path in (FOLDER / "byteps").rglob("*.py")}
    info = f"psgc_byteps-{psgc.__version__}.dist-info"
    assert "bpslaunch = psgc.launch.job.bpslaunch:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"Requires-Dist: psgc=={psgc.__version__}" in wheel.read(f"{info}/METADATA").decode()
    wheel.extractall(tmp_path / "installed")
    for beside, status, said in (("", 0, ""), (str(theirs), 1, "ImportError: psgc-byteps: BytePS 0.2.5 is installed in")):
        paths = ":".join(filter(None, (str(tmp_path / "installed"), beside, str(ROOT))))
        done = subprocess.run(
            [sys.executable, "-c", "import byteps"], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr


FOLDER = ROOT / "psgc" / "compat"


def test_the_package_is_not_built_for_an_environment_that_has_byteps(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(theirs))
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(PROJECT / "setup.py"))
    assert re.fullmatch(
        r"psgc-byteps: BytePS 0\.2\.5 is installed in .*: run `pip uninstall byteps` first, or .*--as-byteps`", str(refused.value)
    )
