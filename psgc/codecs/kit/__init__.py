"""A codec in one file, from vectorised operators. ``codec.py`` has the base class; docs/writing-a-codec.md builds one."""

from psgc.codecs.kit.codec import KitCodec
from psgc.codecs.kit.fields import Field
from psgc.codecs.kit.ops import Ops, Random, Vector
from psgc.codecs.kit.values import Choice, Real, Whole

__all__ = ["Choice", "Field", "KitCodec", "Ops", "Random", "Real", "Vector", "Whole"]
