"""The processes of a ps-lite job's scheduler and servers: what they say of a user's mistake."""

from __future__ import annotations

import re
import socket

import pytest

from psgc.errors import UsageError
from psgc.launch.job.role import run_role
from psgc.launch.job.run import run_job
from tests.ports import free_port
from tests.pslite.test_offices import BASE


def test_a_users_mistake_is_one_line_and_a_status_that_is_not_zero(capfd: pytest.CaptureFixture[str]) -> None:
    local = {**BASE, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "PSGC_LOG_LEVEL": "error"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for role, more, status, said in (
            ("server", {"PSGC_TOKEN": "secret"}, 2, "psgc server: PSGC_WIRE=pslite and PSGC_TOKEN: ps-lite has no authentication"),
            ("server", {"DMLC_INTERFACE": "nosuch0"}, 2, "psgc server: DMLC_INTERFACE=nosuch0: no interface 'nosuch0' with an IPv4 address"),
            ("server", {"PSGC_WIRE": "ps-lite"}, 2, "PSGC_WIRE='ps-lite' is wrong: expected one of psgc, pslite"),
            ("scheduler", {"DMLC_PS_ROOT_PORT": port}, 1, f"psgc scheduler: cannot listen on 127.0.0.1:{port} for ps-lite"),
            ("server", {"PSGC_REGISTER_TIMEOUT_S": "0.2"}, 1, r"this ps-lite server has waited [0-9]+ s for the ps-lite scheduler at 127\.0\.0\.1"),
        ):  # fmt: skip
            assert run_role(role, {**local, **more}) == status
            errors = capfd.readouterr().err
            assert re.search(said, errors) and errors.count("\n") == 1, errors


def test_psgc_run_says_how_to_start_such_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSGC_WIRE", "pslite")
    with pytest.raises(UsageError, match=r"PSGC_WIRE=pslite: .* start each role of this one with psgc-launch"):
        run_job(["true"])
