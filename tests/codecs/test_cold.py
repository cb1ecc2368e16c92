"""Kernels are timed with data that other work has driven out of the caches."""

from __future__ import annotations

from psgc.codecs.common.cold import Cold


def test_the_median_of_runs_counts_and_each_comes_after_other_work() -> None:
    """A clock of its own: runs take 5, 1, 9, 2 and 100 us."""
    now, took, events = [0], [7_000, 5_000, 1_000, 9_000, 2_000, 100_000], list[str]()

    def run() -> None:
        events.append("run")
        now[0] += took[events.count("run") - 1]

    class Noted(Cold):
        def _ns(self, run: object) -> int:
            events.append("other work")
            return super()._ns(run)  # type: ignore[arg-type]

    assert Noted(lambda: now[0], repeats=5).us(run) == 5.0
    assert events == ["run", *["other work", "run"] * 5]


def test_what_takes_no_time_takes_a_nanosecond() -> None:
    assert Cold(lambda: 3, repeats=3).us(lambda: None) == 1e-3
