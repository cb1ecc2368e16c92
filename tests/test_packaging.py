"""What is installed is psgc and nothing else, and the tree keeps the shape that makes it so."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cases import for_each

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
FOLDERS = ("server", "worker", "cuda", "launch")
# Folders of a package, each of which imports from those before it only.
FLOORS = {
    "psgc.plan": ("inputs", "model", "planfile", "local_search", "methods", "live", "report", "whatif"),
    "psgc.torch": ("device", "collectives", "session", "tensors", "state", "plans", "gradients", "auto", "ddp", "optimizers", "elastic"),
    "psgc.launch": (
        "supervision",
        "bench",
        "topology",
        "job",
        "kubernetes",
        "on_ray",
        "doctor",
        "profiling",
        "pages",
        "observing",
        "verbs",
    ),
}
LAYERS = {
    "core": 1,
    "cuda": 2,
    "server": 2,
    "worker": 2,
    "scheduler": 2,
    "torch": 3,
    "launch": 4,
    "compat": 5,
    "ray": 5,
    "__main__": 5,
    "reproduce": 5,
}


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(p for folder in ("psgc", *FOLDERS) for p in (ROOT / folder).rglob("*.py") if not any(q.is_symlink() for q in p.parents))


@functools.cache
def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "psgc" else ("psgc", *relative.parts)
    return ".".join(part for part in parts if part != "__init__")


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYERS.get(parts[1], LAYERS["core"]) if len(parts) > 1 else LAYERS["core"]


@functools.cache
def nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "psgc"}
    return names


def imported(path: Path) -> set[str]:
    """The modules that a module imports, of psgc: a name that is imported from a package may be one."""
    modules = {module_of(source) for source in sources()}
    names = imports(path)
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    packages = {module_of(source) for source in sources() if source.stem == "__init__"}
    return names & (modules - packages)


def test_only_psgc_is_installed() -> None:
    assert importlib.metadata.distribution("psgc").read_text("top_level.txt") == "psgc\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_links_lead_to_the_top_folders(folder: str) -> None:
    link = ROOT / "psgc" / folder
    assert link.is_symlink(), f"psgc/{folder} is no link: check out with core.symlinks=true"
    assert os.readlink(link) == f"../{folder}"


def test_cuda_itself_is_no_package() -> None:
    assert not (ROOT / "cuda" / "__init__.py").exists(), "it would shadow NVIDIA's cuda for anyone who runs in the checkout"


@for_each(path=sources())
def test_imports_point_one_way(path: Path) -> None:
    own = module_of(path)
    for name in imports(path):
        if name.startswith("psgc."):
            assert layer(name) <= layer(own), f"{own} imports {name}"
            peers = {own.partition(".")[2].split(".")[0], name.split(".")[1]}
            assert not (peers <= {"cuda", "server", "worker", "scheduler"} and len(peers) > 1), f"{own} imports its peer {name}"


@pytest.mark.parametrize("package", FLOORS)
def test_folders_import_from_those_before_them_only(package: str) -> None:
    floors, depth = FLOORS[package], len(package.split("."))
    graph = {module_of(path): imported(path) for path in sources() if path.parent.name in floors and path.stem != "__init__"}
    for own, names in graph.items():
        for name in names:
            if own.startswith(f"{package}.") and name.startswith(f"{package}.") and name.split(".")[depth] in floors:
                assert floors.index(name.split(".")[depth]) <= floors.index(own.split(".")[depth]), f"{own} imports {name}"


def test_nothing_imports_in_a_circle() -> None:
    """Not within functions either: what a module needs can be read without what needs it."""
    graphlib.TopologicalSorter(
        {module_of(path): imported(path) for path in sources()}
    ).prepare()  # raises CycleError, which names the circle


@for_each(path=sources())
def test_only_config_and_launchers_read_the_environment(path: Path) -> None:
    own = module_of(path)
    if own == "psgc.config" or own.startswith("psgc.launch"):
        return
    assert not re.search(r"os\.environ|os\.getenv|sys\.argv", path.read_text()), own


# Names that are imported, by the distribution that has them.
DISTRIBUTIONS = {"zmq": "pyzmq", "llvmlite": "numba"}  # numba is of no use without llvmlite
# With a line that says what to install.
OPTIONAL = {
    "matplotlib": ("psgc.plan.whatif.pictures",),
    "cryptography": ("psgc.transport.security.encryption",),
    "aiohttp": ("psgc.launch.observing.page",),
    "prometheus_client": ("psgc.observe.exporter",),
    "opentelemetry": ("psgc.observe.telemetry",),
    "ray": ("psgc.launch.on_ray.launching", "psgc.launch.on_ray.train"),
}


@for_each(path=sources())
def test_what_is_imported_is_installed_with_psgc(path: Path) -> None:
    required = {re.split(r"[^\w-]", text)[0] for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    for name in {name.partition(".")[0] for name in imports(path)} | set(re.findall(r'import_module\("(\w+)', path.read_text())):
        if name in sys.stdlib_module_names or name == "psgc" or module_of(path) in OPTIONAL.get(name, ()):
            continue
        if name == "triton" and module_of(path).startswith(
            "psgc.cuda."
        ):  # it comes with torch for CUDA, without which nobody imports these
            continue
        assert DISTRIBUTIONS.get(name, name) in required, f"{module_of(path)} imports {name}"


def test_triton_is_not_imported_where_tensors_are_on_the_cpu() -> None:
    code = "import sys, psgc.torch, psgc.launch.cli, psgc.server.loop\nfrom psgc.codecs import backends, registry\n"
    code += "found = [backends.device_codec(registry.parse_codec(text), 'cpu') for text in registry.registered_codecs()]\n"
    code += "assert found == [None] * len(found) and 'cuda' in backends.backends(registry.parse_codec('none'))\n"
    code += "cuda = [name for name in sys.modules if name.partition('.')[0] == 'triton' or name.startswith('psgc.cuda')]\n"
    code += "assert not cuda, cuda"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_image_installs_torchs_cpu_build_unless_it_is_told_otherwise() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG TORCH_INDEX=https://download\.pytorch\.org/whl/cpu$", text, re.MULTILINE)
    assert re.search(r"pip install .*--extra-index-url \"\$\{TORCH_INDEX\}\"", text)
    assert re.search(r"^RUN psgc warm", text, re.MULTILINE)
    for command in re.findall(r"^RUN ((?:.*\\\n)*.*)", text, re.MULTILINE):
        assert subprocess.run(["sh", "-n", "-c", command.replace("\\\n", " ")], check=False).returncode == 0, command


def test_help_starts_without_the_heavy_packages() -> None:
    code = "import sys; sys.argv = ['psgc', '--help']\nimport psgc.launch.cli as c\ntry:\n c.main()\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'numba', 'zmq', 'numpy'} & set(sys.modules), set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_scheduler_starts_without_torch() -> None:
    code = "import sys, psgc.scheduler.loop, psgc.server.loop\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def built_wheel(folder: Path) -> Path:
    """A wheel of the checkout, as of a commit of 2026."""
    source = folder / "source"  # a folder `build` in the checkout would be taken into the wheel, files long deleted and all
    unwanted = shutil.ignore_patterns(".*", "build", "demo-out", "tour-out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1790000000"})
    return next(folder.glob("*.whl"))


@pytest.mark.long
def test_a_wheel_has_the_same_bytes_whenever_it_is_built(tmp_path: Path) -> None:
    """With SOURCE_DATE_EPOCH, which `make dist` sets to the commit's time."""
    assert built_wheel(tmp_path / "one").read_bytes() == built_wheel(tmp_path / "two").read_bytes()


def test_a_built_wheel_holds_every_package(tmp_path: Path) -> None:
    names = zipfile.ZipFile(built_wheel(tmp_path)).namelist()
    shipped = (module_of(path).replace(".", "/") for path in sources() if not module_of(path).startswith("psgc.reproduce"))
    for wanted in ("psgc/wire/PROTOCOL.md", "psgc/py.typed", *shipped):
        assert {wanted, f"{wanted}.py", f"{wanted}/__init__.py"} & set(names), f"{wanted} is not in the wheel"
    assert not [name for name in names if name.startswith("psgc/reproduce")], "the papers' experiments are run from a checkout"
    assert all(name.startswith(("psgc/", "psgc-")) for name in names)
