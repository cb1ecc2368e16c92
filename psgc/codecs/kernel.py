"""How a kernel is compiled: ahead of its first call, for one signature, without the GIL, from a cache that cannot be stale.

Owns the compiler's settings and the cache's place. Knows nothing of what a kernel computes.

Numba's own cache looks only at the file that a kernel stands in, and rewrites data files in place; so a changed helper in another
file, a second CPU type on a shared disk or a process started amid an upgrade can load wrong code. Here every state of the sources
and every CPU has a folder of its own: nothing in it is ever replaced by something different, and processes may fill it together.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import llvmlite.binding
import numba.core.caching
import numba.extending
import numba.misc.appdirs
from numba import types

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)
_llvm: Any = llvmlite.binding  # untyped
_numba: Any = numba  # untyped

Function = TypeVar("Function", bound=Callable[..., Any])

# No fastmath and no contraction: sums and roundings are part of what a codec promises.
SETTINGS: Final[dict[str, Any]] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": False}

I64: Final = types.int64
U32: Final = types.uint32
I64_PAIR: Final = _numba.types.UniTuple(I64, 2)
SCALAR_F32: Final = types.float32
BOOL: Final = types.boolean
IN_BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)  # accepts writable arrays too
OUT_BYTES: Final = types.Array(types.uint8, 1, "C")
IN_F32: Final = types.Array(types.float32, 1, "C", readonly=True)
OUT_F32: Final = types.Array(types.float32, 1, "C")

_cache_setting = threading.Lock()


def primitive(function: Callable[..., Any]) -> Any:
    """Mark a code generator as an instruction that kernels and helpers can call."""
    return _numba.extending.intrinsic(function)


def helper(function: Function) -> Function:
    """Mark a function that kernels call; it is compiled into them."""
    return cast("Function", _numba.njit(**SETTINGS)(_named_by_closure(function)))


def _named_by_closure(function: Function) -> Function:
    """Add what a closure encloses to its name, so that no two functions that differ share one.

    Machine code is linked by name. Numba tells closures of one function apart by a count that begins anew in each process, so that kernels
    which different processes compiled and cached could be called in place of one another.
    """
    if function.__closure__:
        values = [cell.cell_contents for cell in function.__closure__]
        enclosed = [getattr(value, "py_func", value) for value in values]
        text = repr([getattr(value, "__qualname__", value) for value in enclosed])
        function.__qualname__ += hashlib.sha256(text.encode()).hexdigest()[:12]
    return function


def chosen_by_type(stub: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make ``stub`` callable from kernels; the function takes the arguments' types and returns what to compile for them.

    Functions are not passed to helpers as arguments: Numba holds such an argument by address and then cannot cache the kernel.
    """
    return cast("Callable[[Function], Function]", _numba.extending.overload(stub, jit_options=SETTINGS, strict=False))


class _KernelCache(_numba.core.caching.FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, in a folder where nothing but ``function`` with the helpers it encloses can have its name.

    Numba would tell closures apart by their pickled helpers, which carry an id that is new in each process, and so never find them.
    """

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), hashlib.sha256(self._py_func.__code__.co_code).hexdigest()


def kernel(signature: Any, tag: str = "", encloses: Sequence[Any] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for ``signature`` now, or load it from the cache. Later calls with other types raise TypeError.

    tag: tells kernels apart that are made by one function of the source from different helpers. encloses: those helpers.
    """

    def build(function: Callable[..., Any]) -> Any:
        dispatcher = _numba.njit(**SETTINGS)(_named_by_closure(function))
        folder = _cache_folder(*sorted({sys.modules[f.__module__].__file__ or "" for f in (function, *encloses)}))
        if folder is not None:
            with _caching_in(folder / tag):
                dispatcher._cache = _KernelCache(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return build


@contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Numba reads the cache's place once, when caching is switched on for a function."""
    with _cache_setting:
        before = _numba.config.CACHE_DIR
        _numba.config.CACHE_DIR = str(folder)
        try:
            yield
        finally:
            _numba.config.CACHE_DIR = before


@functools.cache
def _cache_folder(*sources: str) -> Path | None:
    """Folder for kernels made from these files, or None where no folder can be written."""
    here = Path(__file__).parent
    digest = hashlib.sha256(f"{_llvm.get_host_cpu_name()} {_llvm.get_host_cpu_features().flatten()}".encode())
    for path in sorted({*here.glob("*.py"), *map(Path, sources)}):
        digest.update(path.read_bytes())
    name = f"psgc-kernels-{digest.hexdigest()[:16]}"
    for base in (_numba.config.CACHE_DIR or here / "__pycache__", _numba.misc.appdirs.AppDirs("psgc", appauthor=False).user_cache_dir):
        if _writable(folder := Path(base) / name):
            return folder
    logger.warning("kernel cache off: no folder can be written, so kernels are compiled at each start; set NUMBA_CACHE_DIR")
    return None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{threading.get_ident()}-{id(folder)}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True
