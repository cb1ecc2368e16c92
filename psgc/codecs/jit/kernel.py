"""How a kernel is compiled: ahead of its first call, for one signature, without the GIL, from a cache that cannot be stale.

Owns the compiler's settings. Knows nothing of what a kernel computes, nor of where it is kept: see `kernel_cache`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import numba.extending
from numba import types

from psgc.codecs.jit.fingerprint import UnseenError, fingerprint, implemented_by
from psgc.codecs.jit.kernel_cache import cache_of
from psgc.compiling import compilation

_numba: Any = numba  # untyped

Function = TypeVar("Function", bound=Callable[..., Any])
_on_call = False

# No fastmath and no contraction: sums and roundings are part of what a codec promises.
SETTINGS: Final[dict[str, Any]] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": False}
# Python never calls a helper. The entry points that it would need took a fifth of the time in which kernels are compiled.
_NO_WRAPPERS: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

I64: Final = types.int64
U32: Final = types.uint32
I64_PAIR: Final = _numba.types.UniTuple(I64, 2)
SCALAR_F32: Final = types.float32
BOOL: Final = types.boolean
IN_BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)  # accepts writable arrays too
OUT_BYTES: Final = types.Array(types.uint8, 1, "C")
IN_F32: Final = types.Array(types.float32, 1, "C", readonly=True)
OUT_F32: Final = types.Array(types.float32, 1, "C")


def primitive(function: Callable[..., Any]) -> Any:
    """Mark a code generator as an instruction that kernels and helpers can call."""
    return _numba.extending.intrinsic(function)


class _Helper(_numba.core.registry.CPUDispatcher):  # type: ignore[misc]
    """Refuses calls from Python, for which there is no entry point: Numba would crash."""

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} is a helper: kernels call it, Python calls {self.py_func.__name__}.py_func")


def helper(function: Function) -> Function:
    """Mark a function that kernels call; it is compiled into them. Calls from Python raise TypeError."""
    dispatcher = _numba.njit(**SETTINGS, **_NO_WRAPPERS)(_named_by_closure(function))
    dispatcher.__class__ = _Helper
    return cast("Function", dispatcher)


def _named_by_closure(function: Function) -> Function:
    """Add what a closure encloses to its name, so that no two functions that differ share one.

    Machine code is linked by name. Numba tells closures of one function apart by a count that begins anew in each process, so that kernels
    which different processes compiled and cached could be called in place of one another.
    """
    if function.__closure__:
        try:
            function.__qualname__ += fingerprint(function)[:12]
        except UnseenError:  # no kernel that calls it is cached
            function.__qualname__ += secrets.token_hex(6)
    return function


def chosen_by_type(stub: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make ``stub`` callable from kernels; the function takes the arguments' types and returns what to compile for them.

    Functions are not passed to helpers as arguments: Numba holds such an argument by address and then cannot cache the kernel.
    """
    overload = _numba.extending.overload(stub, jit_options={**SETTINGS, **_NO_WRAPPERS}, strict=False)

    def choose(function: Function) -> Function:
        implemented_by(stub, function)
        return cast("Function", overload(function))

    return choose


@contextmanager
def compiled_on_call() -> Iterator[None]:
    """Within this context kernels are compiled at their first call, not when their codec is imported: for commands that describe codecs without
    running them. Do not use it where steps are timed or awaited, because a step would then include a compilation."""
    global _on_call  # noqa: PLW0603 - the process has one
    before, _on_call = _on_call, True
    try:
        yield
    finally:
        _on_call = before


class _OnCall:
    """A kernel that is compiled, or loaded, by whoever first calls it."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._built: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._kernel(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    @property
    def _kernel(self) -> Any:
        if self._built is None:
            self._built = self._build()
        return self._built


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for ``signature`` now, or load it from the cache; within ``compiled_on_call`` at its first call. Calls with other
    types raise TypeError."""

    def build(function: Callable[..., Any]) -> Any:
        dispatcher = _numba.njit(**SETTINGS)(_named_by_closure(function))
        cache = cache_of(function, SETTINGS)
        if cache is not None:
            dispatcher._cache = cache
        with compilation():
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return (lambda function: _OnCall(lambda: build(function))) if _on_call else build
