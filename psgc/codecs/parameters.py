"""Reading a codec's parameters from their text, with errors that name codec and parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from psgc.errors import CodecError


class Parametrised(Protocol):
    """The class of a codec or of a scheme."""

    @property
    def name(self) -> str: ...

    @property
    def defaults(self) -> Mapping[str, str]: ...


def with_defaults(codec: Parametrised, given: Mapping[str, str]) -> dict[str, str]:
    """The codec's defaults, overridden by what is given. Raises CodecError for a name the codec does not take."""
    for key in given:
        if key not in codec.defaults:
            takes = f"takes {', '.join(codec.defaults)}" if codec.defaults else "takes no parameters"
            raise CodecError(f"codec {codec.name}: unknown parameter {key!r}; it {takes}")
    return {**codec.defaults, **given}


def read_switch(codec: Parametrised, key: str, text: str) -> bool:
    """A parameter that is 0 or 1."""
    if text not in ("0", "1"):
        raise CodecError(f"codec {codec.name}: parameter {key} is 0 or 1, not {text!r}")
    return text == "1"
