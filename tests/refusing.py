"""What jobs say of calls that are to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psgc.errors import PsgcError


def told(name: str, call: Callable[[], Any]) -> None:
    """Print what the call is refused with, or that it is not."""
    try:
        call()
    except PsgcError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: nothing", flush=True)
