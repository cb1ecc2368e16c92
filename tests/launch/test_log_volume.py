"""What a job writes to its log does not grow with its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "jobs" / "lost_weights.py"


def said(launched: Any, rounds: int, **env: str) -> list[str]:
    """The lines of stderr of a job of 2 workers and 2 servers."""
    command = ("run", "--no-prefix", "--workers", "2", "--servers", "2", "--", sys.executable, str(SCRIPT), "rounds", str(rounds), "0")
    status, out, err = launched.end(launched.psgc(*command, PSGC_SILENCE_S="600", **env))
    assert status == 0, err
    assert out.count("step") >= 2 * rounds
    return [line for line in err.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "env", [{}, {"PSGC_LOG_LEVEL": "info", "PSGC_LOG_STEPS": "0"}], ids=["by default", "info, without a line every so many steps"]
)
def test_a_job_of_many_steps_writes_no_more_than_one_of_few(launched: Any, env: dict[str, str]) -> None:
    few, many = said(launched, 20, **env), said(launched, 800, **env)
    assert few or not env, "something is said at this level"
    assert len(many) <= len(few) + 2, "\n".join(sorted({*many} - {*few})[:20])
