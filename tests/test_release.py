"""What a release is made with, and what a change is checked with: the sdist's bytes, the bill of materials, the site's clicks, the hooks of pre-commit."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(order: int, when: int, owner: int, mode: int) -> bytes:
    """The same two files, as another checkout would pack them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in sorted(("p-1/b.sh", "p-1/a.py"))[::order]:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid, member.gname = 3, when, owner, f"group{owner}"
            member.mode = mode | (0o111 if name.endswith(".sh") else 0)
            tar.addfile(member, io.BytesIO(name[-4:-1].encode()))
    return out.getvalue()


def test_an_sdist_of_the_same_sources_has_the_same_bytes() -> None:
    packed = script(".ci/sdist.py").packed
    one, two = packed(archive(1, 1000, 0, 0o644), 7), packed(archive(-1, 2000, 501, 0o600), 7)
    assert one == two
    assert packed(archive(1, 1000, 0, 0o644), 8) != one
    with tarfile.open(fileobj=io.BytesIO(one), mode="r:gz") as tar:
        found = [(m.name, m.mode, m.mtime, m.uid, tar.extractfile(m).read()) for m in tar.getmembers()]  # type: ignore[union-attr]
    assert found == [("p-1/a.py", 0o644, 7, 0, b"a.p"), ("p-1/b.sh", 0o755, 7, 0, b"b.s")]


def test_the_bill_of_materials_has_all_that_psgc_requires_and_is_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    sbom = script(".ci/sbom.py")
    assert sbom.main([]) == 0
    text = capsys.readouterr().out
    assert sbom.main([]) == 0
    assert capsys.readouterr().out == text
    found = json.loads(text)
    names = {each["name"] for each in found["components"]}
    assert {"torch", "numpy", "numba", "pyzmq", "scipy", "rich", "typer", "llvmlite"} <= names
    assert not {"pytest", "ruff", "mypy"} & names, "what develops it is not installed with it"
    assert found["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    references = {each["bom-ref"] for each in (*found["components"], found["metadata"]["component"])}
    assert {each["ref"] for each in found["dependencies"]} == references
    assert {to for each in found["dependencies"] for to in each["dependsOn"]} <= references


def test_an_extra_adds_what_it_requires() -> None:
    sbom = script(".ci/sbom.py")
    pytest.importorskip("cryptography", reason="the extra `encrypt`")
    more = {each["name"] for each in sbom.document(["encrypt"])["components"]} - {each["name"] for each in sbom.document()["components"]}
    assert "cryptography" in more


def site(folder: Path, pages: dict[str, str]) -> Path:
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'<a href="z.html">navigation</a><article>{text}</article>')
    return folder


def test_clicks_are_counted_by_the_links_of_articles_alone(tmp_path: Path) -> None:
    clicks = script("docs/site/clicks.py")
    pages = {
        "index.html": '<a href="a.html#part">a</a> <a href="https://elsewhere/z.html">z</a>', "a.html": '<a href="files/b.html">b</a>',
        "files/b.html": '<a href="../c.html">c</a>', "c.html": '<a href="d.html">d</a>', "d.html": "the answer", "z.html": "",
    }  # fmt: skip
    where = site(tmp_path, pages)
    found = clicks.clicks(where)
    assert found == {"index.html": 0, "a.html": 1, "files/b.html": 2, "c.html": 3, "d.html": 4}
    clicks.QUESTIONS = [
        clicks.Question("near?", "c.html", ("d",)),
        clicks.Question("far?", "d.html", ()),
        clicks.Question("no?", "z.html", ()),
    ]
    assert clicks.faults(where, found) == ["far? d.html takes 4 clicks, at most 3", "no? z.html takes no way clicks, at most 3"]
    clicks.QUESTIONS = [clicks.Question("what?", "c.html", ("the answer",))]
    assert clicks.faults(where, found) == ["what? c.html does not say 'the answer'"]


def test_twelve_questions_are_asked_of_pages_that_the_site_has() -> None:
    questions = script("docs/site/clicks.py").QUESTIONS
    assert len(questions) == 12
    for question in questions:
        page = question.page.replace("files/index.html", "files/README.html").removesuffix(".html") + ".md"
        text = (ROOT / page.removeprefix("files/") if page.startswith("files/") else ROOT / "docs" / page).read_text()
        for word in question.words:
            assert word in text, (question.asked, word)


def test_the_hooks_of_pre_commit_run_what_is_there() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"- id: (\w+)\n(?:.*\n)*?\s+entry: (.+)", text)
    assert [name for name, _ in hooks] == ["ruff", "format", "mypy", "settings", "site"]
    for _, entry in hooks:
        assert re.match(r"(sh -c '.*)?\.venv/bin/(ruff|mypy|python) ", entry), entry
        for path in re.findall(r"(?:docs|tests)/\S+\.\w+", entry):
            assert (ROOT / path).is_file(), path
