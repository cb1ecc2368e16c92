"""Names in the environment: those that psgc does not know, those that have no effect, and what they were probably meant to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psgc.diagnostics.spelling import nearest
from psgc.errors import ConfigError
from psgc.variables import LAUNCHER_VARIABLES, MEMBERSHIP, MIN_PART_BYTES, OF_OTHERS, PREFIXES, PSLITE_ONLY, VARIABLES, WITHOUT_EFFECT

SIMILARITY_CUTOFF: Final = (
    0.69  # difflib's ratio: DMLC_PS_ROOT_HOST is near to DMLC_PS_ROOT_URI, no name that BytePS or ps-lite has is near to another
)


def _known() -> dict[str, str]:
    """Every name that is honoured under one of psgc's prefixes, by what follows the prefix."""
    names = [name for v in VARIABLES if not v.meaning.startswith("set by") for name in (v.name, *v.aliases)]
    return {name.partition("_")[2]: name for name in reversed((*names, *LAUNCHER_VARIABLES)) if name.partition("_")[0] in PREFIXES}


def unknown(env: Mapping[str, str]) -> dict[str, str]:
    """Names that are set but unknown, each with the name that was probably meant ("" if no name is similar). Names that are not set come first."""
    honoured = (
        {name for v in VARIABLES for name in (v.name, *v.aliases)} | LAUNCHER_VARIABLES.keys() | WITHOUT_EFFECT.keys() | OF_OTHERS.keys()
    )
    found, known = {}, _known()
    missing = {end: name for end, name in known.items() if not env.get(name, "").strip()}
    for name in sorted(env):
        prefix, _, end = name.partition("_")
        if name in honoured or not end:
            continue
        if prefix in PREFIXES:
            meant = nearest(end, known, 0.9) or nearest(end, missing, SIMILARITY_CUTOFF) or nearest(end, known, SIMILARITY_CUTOFF)
            found[name] = known.get(meant, "")
        elif end in missing and sorted(prefix) in [sorted(p) for p in PREFIXES]:  # DLMC_NUM_WORKER
            found[name] = known[end]
    return found


def refuse_mistyped(env: Mapping[str, str]) -> None:
    """Raise ConfigError for a name that was probably meant to say which job this is, or which of its members."""
    for name, meant in unknown(env).items():
        if meant in MEMBERSHIP and not env.get(meant, "").strip():
            raise ConfigError(f"{name}={env[name]} is set, but psgc knows no such name; did you mean {meant}? Else unset it")


def raised(name: str, text: str) -> str:
    """BytePS rounds its BYTEPS_PARTITION_BYTES up to what it can do, and so does psgc, where its own name for it is checked."""
    small = name == "BYTEPS_PARTITION_BYTES" and text.strip().isdigit() and int(text) < MIN_PART_BYTES
    return str(MIN_PART_BYTES) if small else text


def notes_on(env: Mapping[str, str]) -> list[str]:
    """Warnings about names that are unknown or have no effect. A name for another role is no reason: `psgc run` gives all processes the same."""
    notes = [f"{name} is set but has no effect: {why}" for name, why in sorted(WITHOUT_EFFECT.items()) if name in env]
    if env.get("PSGC_WIRE", "").strip().lower() != "pslite":
        notes += [
            f"{name} is set but has no effect without PSGC_WIRE=pslite: {why}" for name, why in sorted(PSLITE_ONLY.items()) if name in env
        ]
    if (given := env.get("BYTEPS_PARTITION_BYTES", "").strip()) != raised("BYTEPS_PARTITION_BYTES", given):
        notes.append(f"BYTEPS_PARTITION_BYTES={given} is raised to {MIN_PART_BYTES}, the least that parts can have")
    for name, meant in unknown(env).items():
        notes.append(f"{name} is set but unknown; " + (f"did you mean {meant}?" if meant else "see docs/env.md for the names psgc honours"))
    return notes
