"""What a user hears while kernels are compiled."""

from __future__ import annotations

import numba

from psgc.codecs.kernel import I64, kernel
from psgc.launch.compiling import compilation_told

SIGNATURE = I64(I64)


def doubled(x: int) -> int:
    return 2 * x


def test_compiling_is_told_when_it_begins_and_when_it_ends_but_not_for_each_helper() -> None:
    told: list[str] = []
    helper = numba.njit(lambda x: x + 1)
    with compilation_told(told.append):
        assert numba.njit(SIGNATURE)(lambda x: helper(x) * 2)(3) == 8
    assert told == ["compiling kernels, once on this machine", ""]


def test_a_kernel_that_is_in_the_cache_is_loaded_in_silence() -> None:
    told: list[str] = []
    kernel(SIGNATURE)(doubled)
    with compilation_told(told.append):
        assert kernel(SIGNATURE)(doubled)(3) == 6
    assert not told
