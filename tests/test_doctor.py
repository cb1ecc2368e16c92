"""``psgc doctor`` finds this machine fit, and says what is wrong with an environment that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def doctor(**env: str) -> tuple[int, dict[str, object]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "psgc.launch", "doctor", "--json"], env={**clean, **env}, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


def test_this_machine_is_fit() -> None:
    status, report = doctor()
    assert (status, report["ok"]) == (0, True), report


def test_a_wrong_setting_is_named_with_its_remedy() -> None:
    status, report = doctor(PSGC_PART_BYTES="many")
    wrong = [check for check in report["checks"] if not check["ok"]]  # type: ignore[attr-defined]
    assert status == 1
    assert [check["name"] for check in wrong if "PSGC_PART_BYTES" in check["found"]], wrong
    assert all(check["remedy"] for check in wrong)


def test_an_unreachable_scheduler_is_said() -> None:
    status, report = doctor(DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT="1")
    assert status == 1
    assert [c["name"] for c in report["checks"] if not c["ok"]] == ["scheduler"]  # type: ignore[attr-defined]
