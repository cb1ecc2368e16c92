"""Packaging: psgc/{server,worker,cuda,launch} are relative links to the top folders, so one search finds everything."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', (Path(__file__).parent / "psgc" / "__init__.py").read_text())
assert VERSION is not None, "psgc/__init__.py states __version__"

setup(
    version=VERSION[1],
    # psgc.reproduce is run from a checkout: it belongs to the papers, not to what is installed
    packages=find_namespace_packages(include=["psgc", "psgc.*"], exclude=["psgc.reproduce", "psgc.reproduce.*"]),
    package_data={"psgc": ["py.typed"], "psgc.wire": ["PROTOCOL.md"], "psgc.launch.observing": ["page.html"]},
)
