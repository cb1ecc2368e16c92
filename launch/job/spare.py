"""``python -m psgc.launch.job.spare``: a process that waits, with imports done, to take a dead worker's place.

Its launcher writes one line of JSON to its stdin: the worker's environment, cores, and command after the interpreter. The process then is what that command
would have made of it. At the end of stdin, without a line, it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from psgc.codecs import BucketContext, parse_scheme
from psgc.errors import CodecError
from psgc.launch.supervision.spares import TITLE


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # its launcher's Ctrl-C ends it without a traceback
    _import_ahead()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(json.loads(line))


def _import_ahead() -> None:
    """What a worker imports, and its codec's kernels."""
    importlib.import_module("psgc.torch")
    importlib.import_module("psgc.worker.cluster")
    importlib.import_module("psgc.worker.collectives.socket_group")  # by which the state comes
    for codec in ("none", os.environ.get("PSGC_CODEC", "").strip() or "none"):
        try:
            parse_scheme(codec, BucketContext("float32")).warm()
        except CodecError:  # the worker says so itself
            continue


def become(task: dict[str, Any]) -> None:
    """Run the worker's command in this process."""
    os.environ.clear()
    os.environ.update(task["env"])
    if rank := os.environ.get("RANK"):
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(f"{TITLE}{rank}")  # `ps -o comm` and `psgc chaos` read it
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])
    what, *rest = task["words"]
    if what == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = [what, *rest], os.path.dirname(os.path.realpath(what))
    script = ModuleType("__main__")
    script.__file__, script.__builtins__ = what, __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = script
    with open(what, "rb") as source:
        code = compile(source.read(), what, "exec")
    exec(code, script.__dict__)


if __name__ == "__main__":
    main()
