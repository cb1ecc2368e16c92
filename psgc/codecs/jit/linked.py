"""How helpers are compiled: as far as kernels need in order to link them, and no further.

Owns Numba's compiler for helpers. A kernel links the code of its helpers, and the compiler inlines and optimises all of it together. Numba would also
optimise each helper by itself, again within each helper that calls it, and make machine code of it, which nobody calls. That took a third of the time
in which kernels are compiled.
"""

from __future__ import annotations

from typing import Any

import numba
import numba.core.codegen
import numba.core.compiler

_numba: Any = numba  # untyped


class _NoMachineCode:
    """What a helper has in place of a code generator."""

    def set_env(self, name: str, environment: Any) -> None:
        """Does nothing: each kernel has a helper's machine code, and ``set_environments`` sets the environment there."""


class _LinkedLibrary(_numba.core.codegen.JITCodeLibrary):  # type: ignore[misc]
    """A helper's code, with that of the helpers that it calls."""

    def _optimize_final_module(self) -> None:
        """Does nothing: kernels are optimised with their helpers."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, _: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _NoMachineCode:
        return _NoMachineCode()


class LinkedCompiler(_numba.core.compiler.Compiler):  # type: ignore[misc]
    """Compiles a function into a library that can be linked, but not called."""

    def compile_extra(self, function: Any) -> Any:
        self.state.library = _LinkedLibrary(self.state.targetctx.codegen(), function.__qualname__)
        return super().compile_extra(function)


def set_environments(compiled: Any) -> None:
    """Give a kernel's machine code the environments of its helpers, without which a helper that prints would hang. compiled: Numba's result."""
    for environment in compiled._find_referenced_environments():
        compiled.library.codegen.set_env(environment.env_name, environment)
