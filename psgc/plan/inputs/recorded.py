"""A profile from a trace file of torch.profiler or Nsight Systems."""

from __future__ import annotations

from pathlib import Path

from psgc.errors import UsageError
from psgc.plan.inputs import kineto, nsight
from psgc.plan.inputs.profile import Profile
from psgc.plan.inputs.traces import profile_of_trace


def profile_of_file(path: Path) -> Profile:
    """The profile of the trace in ``path``. Raises UsageError, in one line, for any other file, and for an incomplete trace."""
    try:
        with path.open("rb") as file:
            first = file.read(len(nsight.MAGIC))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    reader = nsight if first == nsight.MAGIC else kineto
    trace, hardware = reader.read(path)
    return profile_of_trace(trace, path.name, hardware=hardware)
