"""``psgc doctor`` finds no fault with this machine, and names what is wrong with a faulty environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from psgc.launch.verbs import doctor as checks
from tests.plan.commands import psgc

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Its status and report under these settings and no others, whatever others leave of the machine."""
    monkeypatch.setattr(checks, "_memory", lambda: (True, "2048 MiB available"))
    monkeypatch.setattr(checks, "_cores", lambda: (True, "2"))

    def examine(**env: str) -> tuple[int, dict[str, Any]]:
        for name in os.environ:
            if name.startswith(("DMLC_", "PSGC_", "BYTEPS_")):
                monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        done = psgc("doctor", "--json")
        return done.returncode, json.loads(done.stdout)

    return examine


def test_this_machine_is_fit(doctor: Doctor) -> None:
    status, report = doctor()
    assert (status, report["ok"]) == (0, True), report
    (tcp,) = [check for check in report["checks"] if check["name"] == "tcp after a pause"]
    assert tcp["found"].endswith(("(net.ipv4.tcp_slow_start_after_idle)", "not known here")) and "sysctl -w" in tcp["wanted"]


def test_memory_and_cores_are_what_is_left_of_them() -> None:
    for look, least in ((checks._memory, 1024), (checks._cores, 2)):
        ok, found = look()
        assert ok == (int(found.removesuffix(" MiB available")) >= least)


def test_a_wrong_setting_is_named_with_its_remedy(doctor: Doctor) -> None:
    status, report = doctor(PSGC_PART_BYTES="many")
    wrong = [check for check in report["checks"] if not check["ok"]]
    assert status == 1
    assert [check["name"] for check in wrong if "PSGC_PART_BYTES" in check["found"]], wrong
    assert all(check["remedy"] for check in wrong)


def test_on_80_columns_the_table_fits_and_remedies_stand_whole_below_it(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    doctor(PSGC_PART_BYTES="many")  # leaves this setting
    lines = psgc("doctor").stdout.splitlines()
    assert "environment is wrong; remedy: mend the variable named; docs/env.md lists them all" in lines
    assert max(len(line) for line in lines if " is wrong; remedy: " not in line) <= 80


def test_an_unreachable_scheduler_is_said(doctor: Doctor) -> None:
    status, report = doctor(DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT="1")
    assert status == 1
    assert [c["name"] for c in report["checks"] if not c["ok"]] == ["scheduler"]
