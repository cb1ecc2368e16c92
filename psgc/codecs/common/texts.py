"""The text form of codecs: ``name`` or ``name:key=value,...``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from psgc.errors import CodecError


def split_texts(text: str) -> list[str]:
    """The codecs of a list with commas, in which a codec's parameters have commas, too: what begins with ``key=`` belongs to the codec before it."""
    found: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        if found and re.match(r"[^:/=]+=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def split_text(text: str) -> tuple[str, dict[str, str]]:
    """Name and parameters of ``name`` or ``name:key=value,...``. Raises CodecError."""
    name, _, rest = text.strip().partition(":")
    parameters: dict[str, str] = {}
    for item in filter(None, rest.split(",")):  # none after the colon: as programs write a name with whatever parameters there are
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise CodecError(f"codec {name}: parameter {item!r} is not key=value")
        if key in parameters:
            raise CodecError(f"codec {name}: parameter {key!r} is given twice")
        parameters[key.strip()] = value.strip()
    return name, parameters


def join_text(name: str, parameters: Mapping[str, str]) -> str:
    """The text form of a name and its parameters."""
    given = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}:{given}" if given else name
