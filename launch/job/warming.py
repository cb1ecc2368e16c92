"""Compile kernels ahead of their use: ``psgc warm``, and every launcher before it starts a job.

``psgc.codecs.jit.kernel_cache`` keeps compiled kernels. A mark, an empty file beside them, says that all kernels of a codec are compiled. Its name
is a hash of everything that could make recompilation necessary, so that a launcher need not load the compiler to know. If a mark is missing by
mistake, the launcher loses a second; if a mark is wrong, the job's own processes compile and say so.

``psgc warm`` also compiles the kernels for this machine's GPUs, which Triton keeps. A launcher does not: it may run where the job's GPUs are not.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pkgutil
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psgc
from psgc.diagnostics.compiling import gpu_kernels_counted_by, moving_bar, observed_by
from psgc.processes.caches import kernel_folders

BROADCAST_CODEC: Final = "none"  # parameters are broadcast uncompressed, whatever the job's codec is
PLANNER: Final = "the planner"  # the search's own kernels
_GROUPS: Final = "psgc.worker.collectives.pump"  # the kernel of groups between hosts
_PLANNER_PACKAGES: Final = ("psgc.plan.model", "psgc.plan.methods")
_CODECS: Final = Path(psgc.__file__).parent / "codecs"
_PUMP: Final = Path(psgc.__file__).parent / "worker" / "collectives" / "pump.py"


def everything() -> list[str]:
    """All names that ``warm`` accepts: the codecs and schemes of this installation, and the planner."""
    from psgc.codecs import registered_codecs, registered_schemes
    from psgc.codecs.registry import plugin_codecs

    return [*registered_codecs(), *registered_schemes(), *plugin_codecs(), PLANNER]


def is_warm(text: str) -> bool:
    """Whether the codec's kernels have been compiled here, for this processor and these versions."""
    return any(os.path.exists(folder / _mark(text)) for folder in _folders())


def prepare(texts: Iterable[str]) -> None:
    """Compile these codecs' kernels, unless they are compiled already: once before the job instead of in each of its processes. Raises
    CodecError."""
    cold = [text for text in dict.fromkeys((BROADCAST_CODEC, *texts)) if not is_warm(text)]
    if cold and any(map(_can_be_made, _folders())):
        for text in cold:
            _load(text)


def gpus() -> tuple[list[Any], str]:
    """One GPU (a ``torch.device``) of each generation here, for which kernels can be compiled; and, if there is none, why. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return [], "torch finds no GPU here"
    from psgc.cuda.common.usable import why_not

    if reason := why_not():
        return [], reason
    generations: dict[Any, Any] = {}
    for index in range(torch.cuda.device_count()):
        generations.setdefault(torch.cuda.get_device_capability(index), torch.device("cuda", index))
    return list(generations.values()), ""


def warm(texts: Iterable[str], quiet: bool, devices: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Compile or load the kernels of each; on a terminal with a bar, elsewhere with a line on stderr for each. devices: GPUs, whose kernels are compiled,
    too. Returns for each how many were compiled, how many of these for GPUs, and the seconds it took. Raises CodecError."""
    wanted, done = list(dict.fromkeys(texts)), []
    for text in wanted:
        _refuse_unknown(text)
    lines = not quiet and not sys.stderr.isatty()
    if lines:
        _tell(f"compiling the kernels of {', '.join(wanted)}: some 10 s for each that has not been compiled here")
    with _Bar(len(wanted), quiet or lines) as bar, observed_by(bar), gpu_kernels_counted_by(bar.ends):
        for text in wanted:
            before, began = bar.compiled, time.monotonic()
            bar.next(text)
            _load(text)
            on_cpus = bar.compiled
            for device in devices if text != PLANNER else ():
                _load_on_gpu(text, device)
            compiled, seconds = bar.compiled - before, time.monotonic() - began
            done.append({"codec": text, "compiled": compiled, "for_gpus": bar.compiled - on_cpus, "seconds": round(seconds, 2)})
            if lines:
                _tell(f"{text}: {compiled} kernels compiled in {seconds:.0f} s" if compiled else f"{text}: was compiled before")
    return done


def _refuse_unknown(text: str) -> None:
    """Raise CodecError for unknown names, before anything is printed or compiled."""
    from psgc.codecs import parse_scheme
    from psgc.codecs.registry import registered_aliases

    names = {side.partition(":")[0].partition("@")[0].strip() for side in text.split("/")}
    if not names <= {*everything(), *registered_aliases(), "relay", "functions"}:
        parse_scheme(text)


def _tell(text: str) -> None:
    print(f"psgc warm: {text}", file=sys.stderr, flush=True)


class _Bar:
    """Counts compiled kernels, and shows a progress bar unless it is hidden."""

    def __init__(self, total: int, hidden: bool) -> None:
        self.compiled = 0
        self._bar = None if hidden else moving_bar("{task.completed} of {task.total}, {task.fields[kernels]} kernels")
        self._task = None if self._bar is None else self._bar.add_task("", total=total, completed=-1, kernels=0)

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def next(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"compiling {text}")

    def begins(self) -> None:
        """Counted when it ends."""

    def ends(self) -> None:
        self.compiled += 1
        if self._bar is not None:
            self._bar.update(self._task, kernels=self.compiled)


def _load(text: str) -> None:
    """Compile or load one codec's kernels, and write the mark."""
    if text == PLANNER:
        for package in map(import_module, _PLANNER_PACKAGES):
            for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                import_module(module.name)
    else:
        from psgc.codecs import BucketContext, parse_scheme

        parse_scheme(text, BucketContext(shapes=((32, 32),))).warm()
        if text == BROADCAST_CODEC:
            import_module(_GROUPS)
    from psgc.codecs.jit.kernel_cache import cache_folder

    folder = cache_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / _mark(text)).touch()


def _load_on_gpu(text: str, device: Any) -> None:
    """Compile or load one codec's kernels for a GPU. Raises DeviceError if the GPU fails."""
    import torch

    from psgc.launch.job.gpu_warming import warm as warm_on_gpu
    from psgc.torch.device.faults import device_faults

    with device_faults(str(device)), torch.no_grad():
        warm_on_gpu(text, device)
        torch.cuda.synchronize(device)


def _folders() -> tuple[Path, ...]:
    """Folders that kernels may be kept in: the same as in ``kernel_cache``, without loading the compiler."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return kernel_folders(Path(os.environ.get("NUMBA_CACHE_DIR") or _CODECS / "__pycache__"), caches / "psgc")


def _can_be_made(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # of Path, it raises where one may not look
    return os.access(existing, os.W_OK | os.X_OK)


def _mark(text: str) -> str:
    readable = re.sub(r"\W+", "-", text)[:40]
    return f"warm-{readable}-{hashlib.sha256(f'{text} {_state()}'.encode()).hexdigest()[:16]}"


@functools.cache
def _state() -> str:
    """Everything that compiled kernels depend on: sources by size and time, versions, processor, settings of Numba."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite", "numpy")]
    stats = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in (*sorted(_CODECS.rglob("*.py")), _PUMP)]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = {line for line in lines if line.split("\t")[0] in ("model name", "flags")}
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    return repr((psgc.__version__, sys.hexversion, versions, stats, sorted(processor), settings))
