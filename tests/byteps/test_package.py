"""The package ``psgc-byteps``: it installs the name ``byteps`` and ``bpslaunch``, and nothing where BytePS itself is installed."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import psgc
from tests.ports import free_port

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


def tree(folder: Path) -> Path:
    """A copy of this checkout's packages, in which nothing has been built."""
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("psgc", "server", "worker", "launch", "cuda", "compat"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(560)
def test_installed_from_a_checkout_it_runs_a_script_of_two_workers_by_bpslaunch_and_beside_byteps_it_is_refused(
    tmp_path: Path, theirs: Path
) -> None:
    """In an environment that has psgc's dependencies, and pip, from the one that runs the tests; nothing is downloaded."""
    checkout = tree(tmp_path / "checkout")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "DMLC_", "BYTEPS_", "PSGC_"))}

    def run(*command: str, status: int = 0, cwd: Path = tmp_path, **env: str) -> str:
        done = subprocess.run(
            [str(venv / "bin" / command[0]), *command[1:]], env=clean | env, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    packages = Path(run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ("python", "-m", "pip", "install", "--no-index", "--no-build-isolation")
    run(*install, ".", "./compat/byteps", cwd=checkout)
    found = run("python", "-c", "import byteps.torch, psgc; print(byteps.torch.__file__, psgc.__file__)")
    assert found.count(str(packages)) == 2, found
    assert "DMLC_ROLE" in run("bpslaunch", "--help")
    script = str(Path(__file__).parent / "scripts" / "microbenchmark.py")
    port = str(free_port())
    job = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port}
    roles = (
        {"DMLC_ROLE": "scheduler"},
        {"DMLC_ROLE": "server"},
        *({"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)} for rank in range(2)),
    )
    processes = [
        subprocess.Popen(
            [str(venv / "bin" / "bpslaunch"), *(("python3", script) if role["DMLC_ROLE"] == "worker" else ())],
            env=clean | job | role | {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for role in roles
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(said)
    for rank in range(2):
        assert f"rank {rank} of 2: right" in said[2 + rank], said
    run("python", "-m", "pip", "uninstall", "-y", "psgc-byteps")
    shutil.copytree(theirs / "byteps-0.2.5.dist-info", packages / "byteps-0.2.5.dist-info")
    assert f"psgc-byteps: BytePS 0.2.5 is installed in {packages}" in run(*install, "./compat/byteps", status=1, cwd=checkout)
