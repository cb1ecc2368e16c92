"""A user's constraints on plans, read from a file: TOML, or JSON if the name ends in .json.

    most_encodes = 1            # how often a bucket may be encoded: each encoding costs accuracy
    devices = ["gpu"]           # where encoding and decoding may happen; [] plans without compression
    flat = true                 # options without an intra-node stage
    hierarchical = true         # options that sum within nodes first
    servers = true              # options over servers, if the cluster has some
    runtime = false             # true: only what psgc run --plan can run
    [codecs]                    # by patterns of tensor names: their only codec, in place of --codec; the first match counts
    "*.bias" = "none"
    "encoder.*.weight" = "onebit"

All fields may be left out. Buckets hold tensors of one codec.
Owns the file's format and its errors; ``options.Constraints`` says what each field means for an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.documents import read_document
from psgc.plan.model.options import DEVICES, Constraints

SWITCHES: Final = ("flat", "hierarchical", "servers")
FIELDS: Final = ("most_encodes", "devices", *SWITCHES, "runtime", "codecs")
# No constraints: all options, including those over servers.
ALL: Final = Constraints(servers=True)


def load_constraints(text: str) -> Constraints:
    """The constraints in a file. Raises UsageError naming the file and the field."""
    path = Path(text)
    document = read_document(path, f"constraints {text}", toml=path.suffix != ".json")
    return read_constraints(document, f"constraints {text}")


def read_constraints(document: Any, source: str) -> Constraints:
    """Constraints from their document. Raises UsageError naming ``source`` and the field."""
    if not isinstance(document, Mapping):
        raise UsageError(f"{source}: expected an object with some of {', '.join(FIELDS)}")
    for key in document:
        if key == "codec":
            raise UsageError(f"{source}: field codec: choose one for all tensors with --codec, or for those of some names under [codecs]")
        if key not in FIELDS:
            raise UsageError(f"{source}: unknown field {key!r}; expected one of {', '.join(FIELDS)}")
    switches = {key: _switch(document, key, True, source) for key in SWITCHES}
    runtime = _switch(document, "runtime", False, source)
    codecs = _codecs(document, source)
    return Constraints(_devices(document, source), _most_encodes(document, source), **switches, runtime=runtime, codecs=codecs)


def _switch(document: Mapping[str, Any], key: str, otherwise: bool, source: str) -> bool:
    value = document.get(key, otherwise)
    if not isinstance(value, bool):
        raise UsageError(f"{source}: field {key} is {value!r}, expected true or false")
    return value


def _codecs(document: Mapping[str, Any], source: str) -> tuple[tuple[str, str], ...]:
    value = document.get("codecs", {})
    if not isinstance(value, Mapping) or not all(isinstance(codec, str) for codec in value.values()):
        raise UsageError(f"{source}: field codecs is {value!r:.80}, expected codecs by patterns of tensors' names")
    return tuple(value.items())


def _devices(document: Mapping[str, Any], source: str) -> tuple[str, ...]:
    value = document.get("devices", list(DEVICES))
    if not isinstance(value, list) or any(device not in DEVICES for device in value):
        raise UsageError(f"{source}: field devices is {value!r}, expected a list of {' and '.join(DEVICES)}, or of none")
    return tuple(device for device in DEVICES if device in value)


def _most_encodes(document: Mapping[str, Any], source: str) -> int | None:
    value = document.get("most_encodes")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UsageError(f"{source}: field most_encodes is {value!r}, expected a whole number of at least 0")
    return value
