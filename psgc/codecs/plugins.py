"""Codecs and schemes of other packages: found by entry point, and compared by their sources.

Owns the group ``psgc.codecs``. A package that has in its metadata

    [psgc.codecs]
    threshold = my_package.threshold:ThresholdCodec

makes ``threshold`` a codec wherever it is installed; a subclass of ``Scheme`` is found in the same group. Workers, servers and the scheduler
must run the same code: the canonical text, which travels in layouts, holds a digest of the sources (``threshold@3f9c01d2a4b5``), and
``registry`` refuses any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from psgc.codecs.codec import PLUGIN_ID, Codec
from psgc.codecs.scheme import Scheme
from psgc.errors import CodecError

GROUP: Final = "psgc.codecs"


def plugins(reserved: Collection[str]) -> dict[str, str]:
    """Names of other packages' codecs, with the distribution that each is from. Raises CodecError for a name that is taken."""
    found: dict[str, str] = {}
    for entry in _entries():
        package = _package(entry)
        if entry.name in reserved or entry.name in found:
            owner = found.get(entry.name, "psgc")
            raise CodecError(
                f"codec {entry.name}: {package} has one of this name, but so has {owner}; rename it, or uninstall one of the two"
            )
        found[entry.name] = package
    return found


def load_plugin(name: str, package: str) -> type[Codec] | type[Scheme]:
    """The class that ``package`` has for this name. Raises CodecError for one that does not work."""
    entry = next(entry for entry in _entries() if entry.name == name)
    start = f"codec {name} of {package}"
    try:
        found = entry.load()
    except Exception as error:  # whatever another package does when it is imported
        raise CodecError(f"{start}: {entry.value} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Codec | Scheme)) or inspect.isabstract(found):
        raise CodecError(f"{start}: {entry.value} is no subclass of psgc.codecs.Codec, or of psgc.codecs.Scheme, with all of its methods")
    if found.name != name:
        raise CodecError(f"{start}: the class calls itself {found.name!r}; the entry point and the class must have one name")
    if issubclass(found, Codec) and not PLUGIN_ID <= found.codec_id < 2 * PLUGIN_ID:
        raise CodecError(
            f"{start}: codec_id is {found.codec_id}; ids of other packages' codecs lie from {PLUGIN_ID} to {2 * PLUGIN_ID - 1}"
        )
    return found


def _entries() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package without metadata"
