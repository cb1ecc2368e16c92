"""Reading what users wrote: JSON and TOML files, and numbers in them.

Owns the errors that all such files share: unreadable, malformed, not a number, or out of range. Knows no field's meaning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# More microseconds (11 days), Gbit/s or machines than any job has. With larger numbers, sums would lose their small terms to rounding.
MOST: Final = 1e12


def read_document(path: Path, whose: str, *, toml: bool = False) -> Any:
    """The file's contents. Raises UsageError, in one line that begins with ``whose``."""
    try:
        text = path.read_text()
        return tomllib.loads(text) if toml else json.loads(text)
    except OSError as error:
        raise UsageError(f"{whose}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{whose}: nested too deeply to be read") from None
    except ValueError as error:  # malformed JSON or TOML, or text that is not UTF-8
        raise UsageError(f"{whose}: not valid {'TOML' if toml else 'JSON'}: {error}") from None


def is_number(value: Any, *, above: bool = False) -> bool:
    """Whether it is a number from 0 to MOST; above: 0 itself does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST and (value > 0 or not above)


def shown(value: Any) -> str:
    """A wrong value as an error message quotes it: shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}.."
