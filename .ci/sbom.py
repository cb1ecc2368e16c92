"""What psgc is installed with here, as a CycloneDX 1.5 document (JSON): psgc and all that it requires, with versions and licences.

    python .ci/sbom.py [--extra encrypt] [--out FILE]

The same environment gives the same bytes: there is no time, and the serial number follows from the content. Extras are those that are named by ``--extra``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = "psgc"


class SbomError(Exception):
    """Why there is no document, in a line."""


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(distribution: metadata.Distribution, extras: Sequence[str] = ()) -> Iterator[str]:
    """The names of what it requires in this environment."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement.name


def closure(extras: Sequence[str]) -> dict[str, tuple[metadata.Distribution, list[str]]]:
    """psgc and all that it requires, each with the names that it requires itself. Raises SbomError for one that is not installed."""
    found: dict[str, tuple[metadata.Distribution, list[str]]] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SbomError(f"sbom: {name} is required and not installed; run it in the environment that psgc is installed in") from None
        needs = sorted({normal(each) for each in required_by(distribution, extras if name == ROOT else ())})
        found[name] = distribution, needs
        waiting += needs
    return found


def licence(distribution: metadata.Distribution) -> list[dict[str, Any]]:
    """As the distribution's metadata says it: an SPDX expression, or the name that it gives."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    named = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or () if each.startswith("License :: ")]
    short = (about.get("License") or "").strip()
    if short and "\n" not in short and len(short) < 80:
        named = named or [short]
    return [{"license": {"name": name}} for name in named]


def document(extras: Sequence[str] = ()) -> dict[str, Any]:
    """The bill of materials. Raises SbomError."""
    found = closure(extras)
    references = {name: f"pkg:pypi/{name}@{distribution.version}" for name, (distribution, _) in found.items()}

    def component(name: str) -> dict[str, Any]:
        distribution, _ = found[name]
        licences = licence(distribution)
        return {
            "type": "library", "bom-ref": references[name], "name": name, "version": distribution.version, "purl": references[name],
            **({"licenses": licences} if licences else {}),
        }  # fmt: skip

    body = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": component(ROOT)},
        "components": [component(name) for name in sorted(found) if name != ROOT],
        "dependencies": [{"ref": references[name], "dependsOn": [references[each] for each in found[name][1]]} for name in sorted(found)],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=5)}",
        **body,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sbom.py", description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="one of psgc's extras, such as encrypt; may be repeated")
    parser.add_argument("--out", type=Path, help="write it to this file in place of printing it")
    given = parser.parse_args(arguments)
    try:
        text = json.dumps(document(given.extra), indent=1) + "\n"
        if given.out is None:
            print(text, end="")  # noqa: T201
        else:
            given.out.write_text(text)
    except SbomError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
