"""``python -m psgc.launch.pages.python``: the reference of what users import, in Markdown, from signatures and docstrings; with
``--signatures`` the signatures alone."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

HEAD = """# Python

What can a script import, and what does it do? This page is made from the docstrings of the public names.
"""
MODULES: Final = {"psgc.torch": "import psgc.torch as psgc", "psgc.codecs.kit": "from psgc.codecs.kit import ..."}


def page() -> str:
    """The page: a section a module, a heading a public name."""
    return HEAD + "".join(_module(name, how) for name, how in MODULES.items())


def public(module: str) -> list[str]:
    """The names that a module promises."""
    return sorted(importlib.import_module(module).__all__)


def signatures() -> str:
    """A line for each public name and public method, with its signature: what upgrades keep (docs/upgrading.md)."""
    return "".join(f"{line}\n" for module in MODULES for name in public(module) for line in _lines(importlib.import_module(module), name))


def _lines(module: Any, name: str) -> Iterator[str]:
    thing, place = getattr(module, name), f"{module.__name__}.{name}"
    yield _signature(place, thing) if inspect.isclass(thing) or inspect.isfunction(thing) else place
    for method, own in _methods(thing):
        yield _signature(f"{place}.{method}", own)


def _methods(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods that a class has by itself."""
    if inspect.isclass(thing):
        yield from ((name, own) for name, own in sorted(vars(thing).items()) if not name.startswith("_") and inspect.isfunction(own))


def _module(name: str, how: str) -> str:
    module = importlib.import_module(name)
    return f"\n## {name}\n\n```python\n{how}\n```\n\n{_prose(module)}\n" + "".join(_entries(module, public(name)))


def _entries(module: Any, names: list[str]) -> Iterator[str]:
    for name in names:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        yield f"\n### {name}\n\n```python\n{_signature(name, thing)}\n```\n\n{_prose(thing)}\n"
        for method, own in _methods(thing):
            if own.__doc__:
                yield f"\n`{name}.{_signature(method, own)}`\n\n{_prose(own)}\n"


def _signature(name: str, thing: Any) -> str:
    """The call, without addresses of defaults, and annotations without their quotes."""
    try:
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))
        return name + re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    except (TypeError, ValueError):
        return name


def _prose(thing: Any) -> str:
    """The docstring; what it sets in two backticks is code in Markdown, too. Aligned text stays as it is written."""
    text = inspect.getdoc(thing) or ""
    paragraphs = text.split("\n\n")
    kept = (
        f"```text\n{each}\n```" if re.search(r"^\s*[\w, *]+: {2,}", each, re.MULTILINE) or each.startswith("    ") else each
        for each in paragraphs
    )
    return "\n\n".join(kept).replace("<", "&lt;") if "```" not in text else text


if __name__ == "__main__":
    import sys

    print(signatures() if "--signatures" in sys.argv else page(), end="")
