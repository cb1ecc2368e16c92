"""Counts that outgrow the 32 bits in which they travel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psgc.wire.counts import cut, whole


@given(near=st.integers(0, 1 << 40), away=st.integers(1 - (1 << 31), (1 << 31) - 1))
def test_the_whole_count_is_found_from_its_last_bits(near: int, away: int) -> None:
    count = max(near + away, 0)
    assert whole(cut(count), near) == count
    assert 0 <= cut(count) < 1 << 32
