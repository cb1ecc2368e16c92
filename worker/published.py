"""What a worker may publish for others to look up: checked before it leaves, so that the caller hears of it and not the job."""

from __future__ import annotations

from psgc.errors import UsageError
from psgc.wire.messages import MAX_VALUE_BYTES, MAX_VALUE_NAME


def check_value(name: str, value: bytes = b"") -> None:
    """Raise UsageError for a name or a value that the scheduler would refuse."""
    if not 0 < len(name) <= MAX_VALUE_NAME:
        raise UsageError(f"the name of a published value has {len(name)} letters, expected 1 to {MAX_VALUE_NAME}")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(f"the value published as {name!r} has {len(value)} bytes, at most {MAX_VALUE_BYTES} are kept")
