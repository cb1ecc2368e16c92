"""Compiles a kernel: ahead of its first call, for one signature, to run without the GIL, with a cache that is never stale.

Owns the compiler's settings. Does not know what a kernel computes, nor where compiled code is kept: see `kernel_cache`.
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
from psgc.codecs.jit.linked import LinkedCompiler, set_environments
from psgc.diagnostics.compiling import compilation
from psgc.processes.collector import paused_collector

_numba: Any = numba  # untyped

Function = TypeVar("Function", bound=Callable[..., Any])
_on_call = False

# No fastmath and no contraction, because codecs promise the order and rounding of every operation.
SETTINGS: Final[dict[str, Any]] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": False}
# Python never calls a helper, and C calls neither helpers nor kernels. These entry points took a fifth of the time to compile kernels.
_OF_KERNELS: Final[dict[str, Any]] = {**SETTINGS, "no_cfunc_wrapper": True}
_OF_HELPERS: Final[dict[str, Any]] = {**_OF_KERNELS, "no_cpython_wrapper": True, "pipeline_class": LinkedCompiler}

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
    dispatcher = _numba.njit(**_OF_HELPERS)(_named_by_closure(function))
    dispatcher.__class__ = _Helper
    return cast("Function", dispatcher)


def inlined(function: Function) -> Function:
    """A helper that allocates nothing, compiled into the place of each call, and without counts of references. In other helpers each use of an array in
    a tuple counts, and each call passes the arrays one by one: too slow for what is called millions of times with many arrays."""
    dispatcher = _numba.njit(**_OF_HELPERS, forceinline=True, _nrt=False)(_named_by_closure(function))
    dispatcher.__class__ = _Helper
    return cast("Function", dispatcher)


def _named_by_closure(function: Function) -> Function:
    """Add a digest of a closure's variables to its name, so that different functions have different names.

    Machine code is linked by name. Numba distinguishes the closures of one function by a count that begins anew in each process. So of two kernels
    that different processes have compiled and cached, one could be called in place of the other.
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
    overload = _numba.extending.overload(stub, jit_options=_OF_HELPERS, strict=False)

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
    """A kernel that is compiled, or loaded from the cache, at its first call."""

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
        dispatcher = _numba.njit(**_OF_KERNELS)(_named_by_closure(function))
        cache = cache_of(function, _OF_KERNELS)
        if cache is not None:
            dispatcher._cache = cache
        # A compilation makes some 100,000 objects, most of which live until its end: looking for garbage among them took an eighth of its time.
        with compilation(), paused_collector():
            dispatcher.compile(signature)
        for compiled in dispatcher.overloads.values():
            set_environments(compiled)
        dispatcher.disable_compile()
        return dispatcher

    return (lambda function: _OnCall(lambda: build(function))) if _on_call else build
