"""Fixtures: inputs of many kinds, memory whose end is guarded, and packages that appear to be installed."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from psgc.codecs.codec import F32, Bytes

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
MANUAL = Path(__file__).parents[2] / "docs" / "writing-a-codec.md"
KIT_CODECS = {
    "threshold": "threshold_codec:ThresholdCodec", "mxfp4": "mxfp4_codec:Mxfp4Codec", "ef21": "ef21_scheme:Ef21Scheme",
    "lowrank": "kit_examples:LowRankScheme", "levels3": "kit_examples:LevelsCodec", "halves": "kit_examples:HalvesCodec",
}  # fmt: skip
FINITE_KINDS = ("gauss", "zeros", "negative zeros", "equal", "sparse", "heavy", "denormal", "huge", "signs", "wide")


def make_values(kind: str, numel: int, seed: int = 0) -> F32:
    """A new array, which the test may change."""
    return _of_every_kind(numel, seed)[kind].copy()


@functools.lru_cache(maxsize=64)
def _of_every_kind(numel: int, seed: int) -> dict[str, F32]:
    rng = np.random.default_rng([seed, numel])
    gauss = rng.standard_normal(numel)
    made = {
        "gauss": gauss,
        "zeros": np.zeros(numel),
        "negative zeros": -np.zeros(numel),
        "equal": np.full(numel, -1.5),
        "sparse": gauss * (rng.random(numel) < 0.002),
        "heavy": rng.standard_cauchy(numel),
        "denormal": gauss * 1e-41,
        "huge": np.sign(gauss) * float(np.finfo(np.float32).max),
        "signs": np.where(gauss < 0, -1.0, 1.0),
        "wide": gauss * 10.0 ** rng.uniform(-44, 37, numel),
    }
    limits = np.finfo(np.float32)
    return {kind: np.clip(values, limits.min, limits.max).astype(np.float32) for kind, values in made.items()}


@pytest.fixture(scope="session")
def values() -> Callable[..., F32]:
    """(kind, numel, seed) -> finite float32 values; ``kinds`` names them."""
    return make_values


@pytest.fixture(scope="session")
def kinds() -> tuple[str, ...]:
    return FINITE_KINDS


def at_page_end(data: bytes | Bytes, region: mmap.mmap) -> Bytes:
    """``data`` copied so that the byte after it cannot be touched, wherever that puts its first byte."""
    memory = np.frombuffer(region, np.uint8)[: len(region) - PAGE]
    target = memory[memory.size - len(data) :]
    target[:] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return target


@pytest.fixture
def guarded() -> Iterator[Callable[[bytes | Bytes], Bytes]]:
    """Copies bytes to the very end of accessible memory: a kernel that reads or writes one byte too far dies there."""
    regions = []

    def copy(data: bytes | Bytes) -> Bytes:
        region = mmap.mmap(-1, (-(-len(data) // PAGE) + 1) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        assert LIBC.mprotect(ctypes.c_void_p(start + len(region) - PAGE), ctypes.c_size_t(PAGE), 0) == 0
        regions.append((region, start))
        return at_page_end(data, region)

    yield copy
    for region, start in regions:
        LIBC.mprotect(ctypes.c_void_p(start + len(region) - PAGE), ctypes.c_size_t(PAGE), 3)


def code_of_page(name: str) -> str:
    """The Python code of docs/writing-a-codec.md that begins with this file name."""
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert found is not None, f"{MANUAL} has no code that begins with # {name}"
    return found[1]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(name, version, codecs by entry point, files) -> a folder in which the package is installed."""

    def put(name: str, version: str, codecs: dict[str, str], files: dict[str, str]) -> Path:
        folder = tmp_path_factory.mktemp(name)
        points = "".join(f"{codec} = {target}\n" for codec, target in codecs.items())
        metadata = {
            f"{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{name.replace('-', '_')}-{version}.dist-info/entry_points.txt": f"[psgc.codecs]\n{points}",
        }
        for file, text in (files | metadata).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        return folder

    return put


@pytest.fixture(scope="session")
def kit_package(install: Callable[..., Path]) -> Path:
    """The page's codec and ``kit_examples``, installed as a package."""
    return install("kit-examples", "1.0", KIT_CODECS, kit_files())


@pytest.fixture(scope="session")
def other_kit_package(install: Callable[..., Path]) -> Path:
    """The same with a change that changes no payload's length."""
    return install("kit-examples", "1.0", KIT_CODECS, {name: text.replace("127", "126") for name, text in kit_files().items()})


def kit_files() -> dict[str, str]:
    return {
        **{name: code_of_page(name) for name in ("threshold_codec.py", "mxfp4_codec.py", "ef21_scheme.py")},
        "kit_examples.py": (Path(__file__).parent / "kit_examples.py").read_text(),
    }
