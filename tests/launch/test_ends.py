"""A process that ends again and again is not started again, whether it takes seconds or minutes to end."""

from __future__ import annotations

import pytest

from psgc.launch.supervision.ends import Ends


@pytest.mark.parametrize(("apart_s", "followed"), [(1, 3), (19, 3), (21, 9), (600, 9)])
def test_so_many_are_followed_by_others(apart_s: int, followed: int) -> None:
    ends, said = Ends(), ""
    for number in range(followed + 1):
        assert not said
        said = ends.another(100.0 + number * apart_s)
    assert said == f"{followed + 1} times in {followed * apart_s} s"


def test_a_step_begins_it_anew() -> None:
    ends = Ends()
    for number in range(100):
        assert not ends.another(float(number))
        ends.stepped()
