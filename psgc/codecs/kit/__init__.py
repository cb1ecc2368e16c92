"""A codec, or a scheme with state, in one file, from vectorised operators. ``codec.py`` and ``scheme.py`` have the base classes;
docs/writing-a-codec.md builds one of each."""

from psgc.codecs.kit.codec import KitCodec
from psgc.codecs.kit.fields import Field
from psgc.codecs.kit.ops import Ops, Random, Vector
from psgc.codecs.kit.scheme import KitScheme
from psgc.codecs.kit.values import Choice, Real, Whole

__all__ = ["Choice", "Field", "KitCodec", "KitScheme", "Ops", "Random", "Real", "Vector", "Whole"]
