"""How many of a part's elements a sparse codec sends: k, as a count or as a share.

Owns the text of k and what parts can be counted; knows neither payloads nor how elements are chosen.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Final

from psgc.codecs.common.parameters import Parametrised
from psgc.errors import CodecError

MOST_ELEMENTS: Final = 2**31 - 1
_LEAST_SHARE: Final = Decimal("1e-9")  # below, no part is long enough for a second element


def count_of(k: Fraction | int, numel: int) -> int:
    """The number of elements out of ``numel`` that a count or a share selects: at least one, at most all."""
    return min(k, numel) if isinstance(k, int) else -(-k.numerator * numel // k.denominator)


def check_part(codec: Parametrised, numel: int) -> None:
    """Raise CodecError for a part without elements, or of more than indices can count."""
    if not 1 <= numel <= MOST_ELEMENTS:
        raise CodecError(f"codec {codec.name} carries parts of 1 to {MOST_ELEMENTS} elements, not {numel}")


def check_count(codec: Parametrised, k: Fraction | int, of: int, what: str) -> None:
    """Raise CodecError if k is a count larger than a whole bucket. (A bucket's last part may have fewer than k elements, and sends all of them.)"""
    if isinstance(k, int) and k > of:
        raise CodecError(
            f"codec {codec.name}: parameter k is {k}, but the bucket has only {of} {what}; write a smaller count or a fraction"
        )


def read_k(codec: Parametrised, text: str) -> Fraction | int:
    """k from its text: a count of at least 1 if written as an integer, else a fraction strictly between 0 and 1."""
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) >= 1:
        return int(text)
    return read_share(codec, "k", text, " or a whole count from 1 on")


def read_share(codec: Parametrised, key: str, text: str, or_else: str = "") -> Fraction:
    """A share from its text. or_else: what else the codec takes, for the error."""
    try:
        share = +Decimal(text)  # to 28 digits, so that the canonical text says all of it
    except ArithmeticError:
        share = Decimal(0)
    if not (share.is_finite() and _LEAST_SHARE <= share < 1):
        raise CodecError(f"codec {codec.name}: parameter {key} is a fraction from {_LEAST_SHARE} to below 1{or_else}, not {text!r}")
    return Fraction(share)


def write_k(k: Fraction | int) -> str:
    """Canonical text of k."""
    if isinstance(k, int):
        return str(k)
    return format((Decimal(k.numerator) / Decimal(k.denominator)).normalize(), "f")
