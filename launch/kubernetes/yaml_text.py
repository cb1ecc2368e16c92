"""Documents of mappings, lists, texts, numbers and truth values as YAML, each read back as it was. Texts that could be taken for something else are quoted, as
in JSON, which YAML contains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*")
_WORDS: Final = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(documents: Iterable[Any]) -> str:
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _entry(f"{_scalar(key)}:", each, "" if isinstance(each, list) else "  ")
    elif isinstance(value, list) and value:
        for each in value:
            first, *rest = _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        yield head
        yield from (f"{indent}{line}" for line in _lines(value))
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
