"""Reading a codec's parameters from their text, with errors that name codec and parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import CodecError

# Parameters of any push codec with feedback beside its own, with their defaults: what a worker keeps between steps, see `momentum`.
MOMENTUM_DEFAULTS: Final = {"momentum": "none", "mu": "0.9", "clip": "0", "residual": "float32"}


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
            known = (*codec.defaults, *(MOMENTUM_DEFAULTS if "ef" in codec.defaults and key not in MOMENTUM_DEFAULTS else ()))
            raise CodecError(f"codec {codec.name}: unknown parameter {key!r}; it {takes}{did_you_mean(key.lower(), known)}")
    return {**codec.defaults, **given}


def read_switch(codec: Parametrised, key: str, text: str) -> bool:
    """A parameter that is 0 or 1."""
    if text not in ("0", "1"):
        raise CodecError(f"codec {codec.name}: parameter {key} is 0 or 1, not {text!r}")
    return text == "1"


def read_choice(codec: Parametrised, key: str, text: str, choices: tuple[str, ...]) -> str:
    """A parameter that is one of a few names."""
    if text not in choices:
        raise CodecError(
            f"codec {codec.name}: parameter {key} is {' or '.join(choices)}, not {text!r}{did_you_mean(text.lower(), choices)}"
        )
    return text


def read_whole(codec: Parametrised, key: str, text: str, least: int, most: int) -> int:
    """A parameter that is a whole number from ``least`` to ``most``."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
        raise CodecError(f"codec {codec.name}: parameter {key} is a whole number from {least} to {most}, not {text!r}")
    return int(text)


def read_float(codec: Parametrised, key: str, text: str, least: float, most: float) -> float:
    """A parameter that is a float32 from ``least`` to ``most``."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise CodecError(f"codec {codec.name}: parameter {key} is a number from {least:g} to {most:g}, not {text!r}")
    return float(np.float32(value))


def write_float(value: float) -> str:
    """The shortest text that ``read_float`` reads back as the same float32."""
    return str(np.float32(value)).removesuffix(".0")
