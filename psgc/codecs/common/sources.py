"""The digest of the sources of another package's codec, with which the members of a job compare their versions of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Final

from psgc.errors import CodecError

_DIGITS: Final = 12


def digest_suffix(codec: type, root: type) -> str:
    """``@`` and the digest of the class's sources if it is another package's; empty for psgc's own. root: the class of all codecs."""
    return "" if codec.__module__.partition(".")[0] == "psgc" else f"@{source_digest(codec, root)}"


@functools.cache
def source_digest(codec: type, root: type) -> str:
    """Digest of the sources of the class and of the codecs it inherits from, up to ``root`` but psgc's: of the module's file or, if the module is in a
    package, of all Python files in that package's folder; and of the kit's revision. Raises CodecError where there are no sources."""
    digest, seen = hashlib.sha256(str(getattr(codec, "revision", "")).encode()), set()
    for base in codec.__mro__:
        if not issubclass(base, root) or base.__module__.partition(".")[0] == "psgc":
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
                f"codec {getattr(codec, 'name', codec.__name__)}: the source of {base.__name__} cannot be read, so it cannot be compared: {error}"
            ) from error
    return digest.hexdigest()[:_DIGITS]
