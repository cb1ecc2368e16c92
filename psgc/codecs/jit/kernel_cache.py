"""The cache of compiled kernels on disk: one file for each kernel, named by a digest of everything that determines its machine code.

Owns the folders and the files. Numba's own cache checks only the file that defines a kernel, and rewrites data files in place. So it can load wrong
code after a change of a helper in another file, on a second CPU type with a shared disk, or in a process started during an upgrade. Here a file's
content never changes, and several processes may fill a folder at the same time. Old files are never used again and can be deleted.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import re
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numba
import numba.core.caching
import numba.core.compiler
import numba.core.serialize
import numba.misc.appdirs

from psgc.codecs.jit.fingerprint import VERSIONS, UnseenError, fingerprint
from psgc.processes.caches import kernel_folders

logger = logging.getLogger(__name__)
_numba: Any = numba  # untyped

_CHECK: Final = 32  # bytes of the digest before a file's content
_COMPILER: Final = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "USING_SVML", "DEBUGINFO_DEFAULT")


class KernelCache(_numba.core.caching._Cache):  # type: ignore[misc]
    """One kernel's files, one for each signature and processor. Numba's dispatcher uses it in place of its own cache."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._digest = hashlib.sha256(f"{VERSIONS} {self._name} {sorted(options.items())}".encode())
        self._digest.update(repr([getattr(_numba.config, setting, None) for setting in _COMPILER]).encode())
        self._digest.update(fingerprint(function).encode())

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None."""
        target_context.refresh()
        name = self._file(sig, target_context)
        for folder in _candidates():
            try:
                data = (folder / name).read_bytes()
            except OSError:
                continue
            content = data[_CHECK:]
            if hashlib.sha256(content).digest() != data[:_CHECK]:
                logger.warning("kernel cache: %s is damaged and is made again", folder / name)
                continue
            try:
                return _numba.core.compiler.CompileResult._rebuild(target_context, *pickle.loads(content))
            except (ImportError, AttributeError) as error:  # one of its helpers has moved to another module
                logger.debug("kernel cache: %s is made again: %s", folder / name, error)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, if there is a folder."""
        folder = cache_folder()
        if folder is None or data.library.has_dynamic_globals:
            return
        content = _numba.core.serialize.dumps(data._reduce())
        path = folder / self._file(sig, data.target_context)
        part = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            part.write_bytes(hashlib.sha256(content).digest() + content)
            part.replace(path)
        except OSError as error:  # such as a full disk; this process has its kernel anyway
            part.unlink(missing_ok=True)
            logger.warning("kernel cache: %s cannot be written: %s", path, error)

    def _file(self, sig: Any, target_context: Any) -> str:
        digest = self._digest.copy()
        digest.update(repr((str(sig), target_context.codegen().magic_tuple())).encode())
        readable = re.sub(r"[^\w.]", "", self._name.replace(".<locals>", ""))
        return f"{readable[-80:]}-{digest.hexdigest()[:32]}.nbc"

    def enable(self) -> None:
        """Do nothing: the cache is always on."""

    def disable(self) -> None:
        """Do nothing: the cache is always on."""

    def flush(self) -> None:
        """Do nothing: no cached file is ever stale."""


def cache_of(function: Callable[..., Any], options: dict[str, Any]) -> KernelCache | None:
    """The cache of a kernel; None if it has no fingerprint."""
    try:
        return KernelCache(function, options)
    except UnseenError as error:
        logger.warning("kernel %s is compiled at each start, for what it is made from cannot be told: %s", function.__qualname__, error)
        return None


def _candidates() -> tuple[Path, ...]:
    """The folders that are searched for kernels, the preferred one for new kernels first."""
    beside = Path(_numba.config.CACHE_DIR or Path(__file__).parents[1] / "__pycache__")
    return kernel_folders(beside, Path(_numba.misc.appdirs.AppDirs("psgc", appauthor=False).user_cache_dir))


@functools.cache
def cache_folder() -> Path | None:
    """The folder for new kernels; None if no folder is writable."""
    for folder in _candidates():
        if _writable(folder):
            return folder
    logger.warning("kernel cache off: no folder can be written, so kernels are compiled at each start; set NUMBA_CACHE_DIR")
    return None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{os.getpid()}-{threading.get_ident()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True
