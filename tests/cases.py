"""Loops over small cases within one test, because collecting and reporting each one would take longer than running it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def for_each(**cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize`` for every combination of ``cases`` (argument -> its values), but in one test, which ends at the first
    case that fails and names it. Fixtures of a function's scope are shared by the cases."""
    combinations = [dict(zip(cases, values, strict=True)) for values in itertools.product(*cases.values())]

    def loop_over(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**others: Any) -> None:
            for case in combinations:
                try:
                    test(**case, **others)
                except Exception as error:
                    said = ", ".join(f"{name}={value!r}" for name, value in case.items())
                    raise AssertionError(f"case {said}: {error}") from error

        whole = inspect.signature(test)
        kept = [parameter for name, parameter in whole.parameters.items() if name not in cases]
        assert len(kept) == len(whole.parameters) - len(cases), f"{test.__name__} takes no {', '.join(set(cases) - set(whole.parameters))}"
        loop.__signature__ = whole.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return loop_over
