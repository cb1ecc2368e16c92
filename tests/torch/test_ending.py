"""What is printed when a script dies of an error that nobody catches."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.errors import JobFailed
from psgc.torch.session import ending


def died_of(raise_it: Any) -> list[type[BaseException]]:
    """The kinds that the hook before psgc's heard of."""
    heard: list[type[BaseException]] = []
    hook = ending.watch(lambda: None, lambda kind, error, trace: heard.append(kind))
    try:
        raise_it()
    except Exception as error:
        hook(type(error), error, error.__traceback__)
    return heard


def wrapped() -> None:
    try:
        raise JobFailed("rank 1 is out of data")
    except JobFailed as failure:
        raise RuntimeError("training failed") from failure


def second_error() -> None:
    try:
        raise JobFailed("rank 1 is out of data")
    except JobFailed:
        raise ValueError("the script's own") from None


def handled_wrongly() -> None:
    try:
        raise JobFailed("rank 1 is out of data")
    except JobFailed:
        {}["missing"]  # type: ignore[index]


def test_a_library_that_wraps_a_failed_job_ends_with_psgcs_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert died_of(wrapped) == []
    assert capsys.readouterr().err == "psgc: rank 1 is out of data\n"


@pytest.mark.parametrize(("error", "kind"), [(second_error, ValueError), (handled_wrongly, KeyError)])
def test_an_error_of_the_scripts_own_keeps_its_traceback(error: Any, kind: type[BaseException]) -> None:
    assert died_of(error) == [kind]
