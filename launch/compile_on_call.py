"""Compiles kernels at their first call, for verbs that describe codecs without running them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Verb = TypeVar("Verb", bound=Callable[..., Any])


def compiles_on_call(verb: Verb) -> Verb:
    """Wrap a verb in ``psgc.codecs.jit.kernel.compiled_on_call``. The compiler is imported when the verb runs, not before."""

    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        from psgc.launch.tables import progress

        with progress(bool(options.get("as_json"))):
            from psgc.codecs.jit.kernel import compiled_on_call
        with compiled_on_call():
            return verb(*arguments, **options)

    return run  # type: ignore[return-value]
