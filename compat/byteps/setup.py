"""Packaging of ``psgc-byteps``. `byteps` here is a link to psgc/compat/byteps; the version is psgc's. Refused where BytePS itself is installed."""

import re
import runpy
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
INIT = HERE.parent.parent / "psgc" / "__init__.py"
if not INIT.exists():
    sys.exit("psgc-byteps is built in a checkout of psgc: pip install ./compat/byteps")
VERSION = re.search(r'__version__ = "(.+)"', INIT.read_text())
assert VERSION is not None, "psgc/__init__.py states __version__"
# pip builds in an environment of its own, which does not see the packages of the one that it installs into: their folders are named here.
refusal = runpy.run_path(str(HERE / "byteps" / "conflict.py"))["refusal"]
if why := refusal([*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
    sys.exit(why)

setup(version=VERSION[1], install_requires=[f"psgc=={VERSION[1]}"], packages=find_packages(include=["byteps", "byteps.*"]))
