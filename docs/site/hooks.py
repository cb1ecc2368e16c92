"""What MkDocs does for this site beside its own: pages that are generated, and files outside docs/ that pages link to.

A page may link to any file of the checkout, as it is read on a code host. Here such a file becomes a page of its own under ``files/``: Markdown as
it is, code in a block. The reference pages come from the code: the commands' own help, and the public docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".ipynb": "json"}
REFERENCE = {"reference/commands.md": "psgc.launch.pages.commands", "reference/python.md": "psgc.launch.pages.python"}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    import importlib

    for name, module in REFERENCE.items():
        files.append(File.generated(config, name, content=importlib.import_module(module).page()))
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        here, text = waiting.pop()
        for path in outside(here, text):
            name = page_of(path)
            if files.get_file_from_path(name) is None:
                content = content_of(path)
                files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
                waiting.append((name, content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside docs/ lead to their pages."""
    here = page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        path = resolved(here, found[2])
        if path is None:
            return found[0]
        up = "../" * (len(PurePosixPath(here).parts) - 1)
        return f"{found[1]}{up}{page_of(path)}{found[3] or ''})"

    return LINK.sub(rewritten, markdown)


def outside(here: str, text: str) -> list[Path]:
    """The files outside docs/ that a page links to."""
    found = (resolved(here, target) for _, target, _ in LINK.findall(text))
    return [path for path in found if path is not None]


def resolved(here: str, target: str) -> Path | None:
    """The file of the checkout that a link leads to; None for one in docs/, and for what is no file."""
    own = PurePosixPath(here)
    folder = ROOT / own.relative_to("files").parent if own.parts[0] == "files" else ROOT / "docs" / own.parent
    path = (folder / target).resolve()
    if not path.is_file() or (path.is_relative_to(ROOT / "docs") and own.parts[0] != "files"):
        return None
    return path if path.is_relative_to(ROOT) else None


def page_of(path: Path) -> str:
    """The site's page of a file."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "docs":
        return str(PurePosixPath(*relative.parts[1:]))
    return f"files/{relative.as_posix()}" if path.suffix == ".md" else f"files/{relative.as_posix()}.md"


def content_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {path.relative_to(ROOT)}\n\n```{LANGUAGES.get(path.suffix, '')}\n{text}```\n"
