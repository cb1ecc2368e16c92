"""Codecs of other packages: found by entry point, and compared by their sources.

Owns the group ``psgc.codecs`` and the digest. A package that has in its metadata

    [psgc.codecs]
    threshold = my_package.threshold:ThresholdCodec

makes ``threshold`` a codec wherever it is installed. Workers, servers and the scheduler must run the same code: the canonical text, which
travels in layouts, holds a digest of the sources (``threshold@3f9c01d2a4b5``), and ``parse_codec`` refuses any other.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from psgc.codecs.codec import FOREIGN_ID, Codec, registered_codecs
from psgc.codecs.scheme import registered_schemes
from psgc.codecs.script_codec import FunctionsCodec, registered_functions
from psgc.errors import CodecError
from psgc.spelling import did_you_mean

GROUP: Final = "psgc.codecs"
_DIGITS: Final = 12


def foreign_codecs() -> dict[str, str]:
    """Names of other packages' codecs, with the distribution that each is from. Raises CodecError for a name that is taken."""
    found: dict[str, str] = {}
    for entry in _entries():
        package = _package(entry)
        if entry.name in _own_names() or entry.name in found:
            owner = found.get(entry.name, "psgc")
            raise CodecError(
                f"codec {entry.name}: {package} has one of this name, but so has {owner}; rename it, or uninstall one of the two"
            )
        found[entry.name] = package
    return found


@functools.cache
def load_codec(name: str) -> type[Codec]:
    """The class that another package has for this name. Raises CodecError if there is none, or none that works."""
    if name == FunctionsCodec.name or name in registered_functions():
        raise CodecError(f"codec {name}: its functions exist in the trainer only, so servers cannot decode it; write '{name}/relay'")
    if name in registered_schemes():
        raise CodecError(f"codec {name} takes several rounds and answers in its own way: write {name!r} by itself, not as one of a pair")
    if name == "relay":
        raise CodecError("codec relay is an answer alone: write it behind the codec whose payloads are forwarded, as in 'onebit/relay'")
    packages = foreign_codecs()
    entry = next((entry for entry in _entries() if entry.name == name), None)
    if entry is None:
        functions = [f"{each}/relay" for each in registered_functions()]
        known = (*registered_codecs(), *registered_schemes(), *packages, *functions)
        raise CodecError(
            f"unknown codec {name!r}; there are {', '.join(known)}; one of another package has to be installed with every worker, every server "
            f"and the scheduler{did_you_mean(name.lower(), (*known, 'relay'))}"
        )
    start = f"codec {name} of {packages[name]}"
    try:
        found = entry.load()
    except Exception as error:  # whatever another package does when it is imported
        raise CodecError(f"{start}: {entry.value} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Codec)) or inspect.isabstract(found):
        raise CodecError(f"{start}: {entry.value} is no subclass of psgc.codecs.Codec with all of its methods")
    if found.name != name:
        raise CodecError(f"{start}: the class calls itself {found.name!r}; the entry point and the class must have one name")
    if not FOREIGN_ID <= found.codec_id < 2 * FOREIGN_ID:
        raise CodecError(
            f"{start}: codec_id is {found.codec_id}; ids of other packages' codecs lie from {FOREIGN_ID} to {2 * FOREIGN_ID - 1}"
        )
    return found


@functools.cache
def source_digest(codec: type[Codec]) -> str:
    """Digest of the sources of the class and of the codecs it inherits from, but psgc's: of the module's file or, if the module is in a
    package, of all Python files in that package's folder; and of the kit's revision. Raises CodecError where there are no sources."""
    digest, seen = hashlib.sha256(str(getattr(codec, "revision", "")).encode()), set()
    for base in codec.__mro__:
        if not issubclass(base, Codec) or base.__module__.partition(".")[0] == "psgc":
            continue
        try:
            file = Path(inspect.getfile(base))
            whole = file.parent if "." in base.__module__ or file.name == "__init__.py" else file
            if whole in seen:
                continue
            seen.add(whole)
            for path in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
                text = path.read_bytes()
                digest.update(f"{path.relative_to(whole.parent).as_posix()} {len(text)}\n".encode() + text)
        except (OSError, TypeError) as error:
            raise CodecError(
                f"codec {codec.name}: the source of {base.__name__} cannot be read, so it cannot be compared: {error}"
            ) from error
    return digest.hexdigest()[:_DIGITS]


def _own_names() -> tuple[str, ...]:
    return (*registered_codecs(), *registered_schemes(), FunctionsCodec.name, "relay")


def _entries() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package without metadata"
