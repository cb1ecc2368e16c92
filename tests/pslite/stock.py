"""byteps 0.2.5.post15's server, scheduler and compressors, and ps-lite's worker, built from the source on PyPI: what psgc's ps-lite is held against.

Needs a C++ compiler, Python's headers, PyPI, and Debian's libzmq3-dev (installed, or to be had by ``apt-get download``). The build is kept in the folder
of STOCK_BYTEPS, or in the system's folder for temporary files. ``python -m tests.pslite.stock ROLE`` runs a role.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARCHIVE = "byteps-0.2.5.post15.tar.gz"
DEBS = ("libzmq3-dev", "libzmq5", "libsodium23", "libpgm-5.3-0", "libnorm1")
SOURCES = (
    "byteps/server/server.cc", "byteps/common/cpu_reducer.cc", "byteps/common/logging.cc", "byteps/common/common.cc",
    "byteps/common/compressor/compressor_registry.cc", "byteps/common/compressor/error_feedback.cc",
    *(f"byteps/common/compressor/impl/{name}.cc" for name in ("dithering", "onebit", "randomk", "topk", "vanilla_error_feedback")),
    *(f"3rdparty/ps-lite/src/{name}.cc" for name in ("customer", "postoffice", "van")),
)  # fmt: skip
# As its setup.py compiles the server.
FLAGS = ("-std=c++14", "-fPIC", "-Ofast", "-fopenmp", "-march=native", "-mno-avx512f", "-w", "-DBYTEPS_BUILDING_SERVER")
CLIENT = Path(__file__).with_name("stock_client.cc")


class Unavailable(Exception):
    """Why it cannot be built here."""


def _folder() -> Path:
    return Path(os.environ.get("STOCK_BYTEPS") or Path(tempfile.gettempdir()) / f"psgc-stock-byteps-{os.getuid()}")


def _run(command: list[str], cwd: Path, what: str) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from None
    if done.returncode:
        raise Unavailable(f"{what}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


@functools.cache
def library() -> Path:
    """The built library. Raises Unavailable, saying what is missing."""
    digest = hashlib.sha256(CLIENT.read_bytes() + repr((FLAGS, SOURCES)).encode()).hexdigest()[:12]
    folder = _folder()
    built = folder / f"stock-{digest}.so"
    if built.exists():
        return built
    if not shutil.which("g++"):
        raise Unavailable("g++ is missing")
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        raise Unavailable("Python's headers are missing")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ARCHIVE).exists():
        wanted = ["download", "byteps==0.2.5.post15", "--no-binary", ":all:", "--no-deps", "--no-build-isolation"]
        _run([sys.executable, "-m", "pip", *wanted, "-q", "-d", str(folder)], folder, "byteps 0.2.5.post15 is not to be had from PyPI")
    with tarfile.open(folder / ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    source = folder / ARCHIVE.removesuffix(".tar.gz")
    flags, link = _zeromq(folder)
    includes = [f"-I{source}", f"-I{source}/3rdparty/ps-lite/include", f"-I{source}/3rdparty/ps-lite/src", f"-I{include}", *flags]
    objects = [folder / f"{Path(name).stem}.o" for name in (*SOURCES, CLIENT.name)]

    def compile_one(name: str, to: Path) -> None:
        _run(["g++", *FLAGS, *includes, "-c", name, "-o", str(to)], source, f"{name} does not compile")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, (*SOURCES, str(CLIENT)), objects))
    fresh = built.with_suffix(".new")
    _run(
        ["g++", "-shared", "-fopenmp", "-o", str(fresh), *map(str, objects), *link, "-lpthread", "-lrt"],
        folder,
        "the library does not link",
    )
    fresh.rename(built)
    return built


def _zeromq(folder: Path) -> tuple[list[str], list[str]]:
    """Flags that find ZeroMQ's header, and those that link its library: the system's, or the packages' that are unpacked here."""
    if Path("/usr/include/zmq.h").exists():
        return [], ["-lzmq"]
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable("libzmq3-dev is not installed, and there is no apt-get to download it")
    root = folder / "zeromq"
    if not (root / "usr/include/zmq.h").exists():
        debs = folder / "debs"
        debs.mkdir(exist_ok=True)
        _run(["apt-get", "download", *DEBS], debs, "libzmq3-dev is not installed, and cannot be downloaded")
        for deb in debs.glob("*.deb"):
            _run(["dpkg", "-x", str(deb), str(root)], folder, f"{deb.name} cannot be unpacked")
    libraries = next((root / "usr/lib").glob("*/libzmq.so.5")).parent
    path = ["-Wl,-rpath," + str(libraries), "-Wl,--disable-new-dtags", "-Wl,--allow-shlib-undefined"]
    return [f"-I{root}/usr/include"], [f"-L{libraries}", "-l:libzmq.so.5", *path]


@functools.cache
def loaded() -> Any:
    found = ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
    found.compressor_new.restype = ctypes.c_void_p
    return found


class StockCompressor:
    """One of BytePS's compressors, for parts of one size. text: as it is registered on the wire, as in "2 compressor_type topk compressor_k 0.01"."""

    def __init__(self, text: str, numel: int) -> None:
        self._bytes = 4 * numel
        self._made = ctypes.c_void_p(loaded().compressor_new(text.encode(), self._bytes, 0))

    def encode(self, values: NDArray[np.float32]) -> bytes:
        padded = np.zeros(-(-values.size // 32) * 32, np.float32)  # BytePS's buffers are this long, and onebit reads to the end
        padded[: values.size] = values
        out = ctypes.create_string_buffer(8 * padded.nbytes + 64)
        size = loaded().compressor_encode(self._made, ctypes.c_void_p(padded.ctypes.data), self._bytes, 0, out)
        return out.raw[:size]

    def decode(self, payload: bytes) -> NDArray[np.float32]:
        out = np.empty(self._bytes // 4, np.float32)
        loaded().compressor_decode(self._made, payload, len(payload), 0, ctypes.c_void_p(out.ctypes.data), out.nbytes)
        return out


class StockWorker:
    """ps-lite's worker in this process, whose environment says which job. Only one in a process."""

    def __init__(self) -> None:
        loaded().client_start()
        self.rank: int = loaded().client_rank()

    def push(self, server: int, key: int, values: bytes, cmd: int = 0) -> None:
        loaded().client_push(server, ctypes.c_uint64(key), values, len(values), cmd)

    def pull(self, server: int, key: int, room: int, cmd: int = 0) -> bytes:
        out = ctypes.create_string_buffer(room)
        size = loaded().client_pull(server, ctypes.c_uint64(key), out, room, cmd)
        return out.raw[:size]

    def barrier(self, group: int) -> None:
        loaded().client_barrier(group)

    def finish(self) -> None:
        loaded().client_finish()


if __name__ == "__main__":
    loaded().byteps_server()  # a scheduler or a server, as DMLC_ROLE says
