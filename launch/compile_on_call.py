"""How verbs run that describe codecs and plans without running them: kernels are compiled at their first call, and nothing looks for garbage."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

Verb = TypeVar("Verb", bound=Callable[..., Any])


def compiles_on_call(verb: Verb) -> Verb:
    """Wrap a verb in ``psgc.codecs.jit.kernel.compiled_on_call``. The compiler is imported when the verb runs, not before.

    Imports, options and plans make many objects, hardly any of which becomes garbage that only the collector finds: its looks took a sixth of the time, the
    last one, when the process ends, included."""

    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        from psgc.launch.tables import progress
        from psgc.processes.collector import paused_collector

        atexit.register(gc.freeze)
        with paused_collector():
            with progress(bool(options.get("as_json"))):
                from psgc.codecs.jit.kernel import compiled_on_call
            with compiled_on_call():
                return verb(*arguments, **options)

    return run  # type: ignore[return-value]
