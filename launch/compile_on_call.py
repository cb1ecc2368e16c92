"""Verbs that look at codecs without running them: nothing is compiled for them but what they call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Verb = TypeVar("Verb", bound=Callable[..., Any])


def compiles_on_call(verb: Verb) -> Verb:
    """The verb, run with ``psgc.codecs.jit.kernel.compiled_on_call``. The compiler is loaded only when the verb is called."""

    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        from psgc.launch.tables import progress

        with progress(bool(options.get("as_json"))):
            from psgc.codecs.jit.kernel import compiled_on_call
        with compiled_on_call():
            return verb(*arguments, **options)

    return run  # type: ignore[return-value]
