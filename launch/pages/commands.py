"""``python -m psgc.launch.pages.commands``: the reference of ``psgc``'s verbs and flags, in Markdown, from the commands' own help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HEAD = """# Commands

What does each verb of `psgc` do, and which flags does it take? This page is made from the commands' own help (`psgc VERB --help`).
"""


def page() -> str:
    """The page: a section a verb, in the help's order."""
    import typer

    from psgc.launch.cli import app

    return HEAD + "".join(_sections(typer.main.get_command(app), "psgc"))


def _sections(command: Any, name: str) -> Iterator[str]:
    for verb, own in command.commands.items():
        if hasattr(own, "commands"):
            yield from _sections(own, f"{name} {verb}")
            continue
        yield f"\n## {name} {verb}\n\n{_prose(own.help or '')}\n"
        if flags := [parameter for parameter in own.params if parameter.param_type_name == "option" and not parameter.hidden]:
            yield "\n| flag | default | meaning |\n|---|---|---|\n"
            yield from (_row(flag) for flag in flags)


def _prose(text: str) -> str:
    """The help's paragraphs, with its examples as code."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(re.sub(r"^Example: (.*)$", r"```sh\n\1\n```", paragraph) for paragraph in paragraphs)


def _row(flag: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*flag.opts, *flag.secondary_opts))
    default = "" if flag.default in (None, False, ()) or callable(flag.default) else f"`{flag.default}`"
    meaning = " ".join((flag.help or "").split()).replace("|", "\\|")
    return f"| {names} | {'required' if flag.required else default} | {meaning} |\n"


if __name__ == "__main__":
    print(page(), end="")
