"""What torch.compile leaves alone: psgc's functions that scripts and torch call within a step.

Where a script compiles a function that runs backward or a step, torch.compile (Dynamo) looks at every Python function that is entered meanwhile, hooks and what
they call included. psgc's write to memory of NumPy, take locks and wait: traced, they fail.

Importing Dynamo takes longer than importing psgc, and most scripts do without: so functions are marked by what Dynamo looks at, and it need not be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: torch.compile neither traces the function nor what it calls; a graph ends before a call of it, and another begins after."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # an older torch
        made: F = _disable_dynamo(function)  # type: ignore[assignment]
        return made
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # where it is entered from
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "psgc exchanges tensors here"  # type: ignore[attr-defined]
    return function
