"""A job's machines meet at the scheduler's address, try each other's ports and are all told the same findings."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import PsgcError
from psgc.launch.doctor.compare import Finding
from psgc.launch.doctor.facts import EVERYWHERE, ON_WORKERS, Facts
from psgc.launch.doctor.meeting import host_meeting, join_meeting, unreached_from
from tests.doctor.test_compare import COMMON
from tests.launch.conftest import Launched, launched
from tests.ports import free_port

__all__ = ["launched"]
WAIT_S = 60.0


def job(port: int, **more: Any) -> Config:
    return Config(nodes=2, servers=1, root_host="127.0.0.1", root_port=port, **more)


def facts(config: Config, *roles: str, **more: Any) -> Facts:
    settings = {name: getattr(config, name) for name in (*EVERYWHERE, *ON_WORKERS)}
    workers, servers = int("worker" in roles), int("server" in roles)
    return Facts(
        hostname="here", roles=roles, workers=workers, servers=servers, **{**COMMON, "settings": settings, "root": ("127.0.0.1",), **more}
    )


def meet(port: int, *guests: tuple[Config, Facts], refused: bool = False) -> tuple[list[Finding], list[list[Finding] | str]]:
    """The findings at the scheduler, and of each other machine its own, or the error that it ends with. refused: the guests are, and the scheduler's machine,
    which waits in vain for others, waits a little longer than until they know."""
    config, told = job(port, token="secret"), [[] for _ in guests]  # type: ignore[var-annotated]

    def join(number: int, config: Config, own: Facts) -> None:
        try:
            told[number] = join_meeting(config, own, WAIT_S, lambda _: None)
        except PsgcError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=join, args=(number, *guest)) for number, guest in enumerate(guests)]
    for thread in threads:
        thread.start()

    def all_told(_: str = "") -> None:
        for thread in threads:
            thread.join()

    own = facts(config, "scheduler", "server")
    found = host_meeting(config, own, 1.5, all_told) if refused else host_meeting(config, own, WAIT_S, lambda _: None)
    all_told()
    return found, told


def test_all_machines_get_the_findings_of_all() -> None:
    port = free_port()
    config = job(port, token="secret")
    found, told = meet(
        port, *((replace_codec(config, number), facts(replace_codec(config, number), "worker", node=number)) for number in (0, 1))
    )
    assert [(finding.check, finding.found) for finding in found] == [
        ("settings", "PSGC_CODEC differs: int8 on worker 1 (here); none on worker 0 (here)")
    ]
    assert told == [found, found]


def replace_codec(config: Config, number: int) -> Config:
    return replace(config, codec=("none", "int8")[number])


def test_who_has_another_token_is_refused_and_named_and_who_is_missing_too() -> None:
    port = free_port()
    stranger = job(port, token="guessed")
    found, told = meet(port, (stranger, facts(stranger, "worker", node=0)), refused=True)
    assert {(finding.check, finding.whose) for finding in found} == {
        ("members", "worker 0"),
        ("members", "worker 1"),
        ("token", "127.0.0.1"),
    }
    assert f"127.0.0.1:{port} refuses this machine: PSGC_TOKEN here is not the scheduler's" in str(told[0])


def test_without_a_scheduler_it_is_said_what_to_start() -> None:
    config = job(free_port())
    with pytest.raises(PsgcError, match=r"Connection refused; run `psgc doctor --job` with DMLC_ROLE=scheduler there"):
        join_meeting(config, facts(config, "worker", node=0), 0.1, lambda _: None)


def test_a_port_that_the_job_itself_has_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = job(taken.getsockname()[1])
        with pytest.raises(PsgcError, match=r"`psgc doctor --job` meets there before the job is started"):
            host_meeting(config, facts(config, "scheduler"), 0.1, lambda _: None)


def close_next(listener: socket.socket) -> None:
    listener.accept()[0].close()


def test_closed_ports_and_other_programs_behind_them_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=close_next, args=(other,), daemon=True).start()
        targets = [
            {"name": "server (there)", "host": "127.0.0.1", "port": port, "door": "0" * 16}
            for port in (other.getsockname()[1], free_port())
        ]
        assert [each["error"] for each in unreached_from("worker 0", targets)] == ["something else answers there", "Connection refused"]


def test_two_machines_compare_themselves(launched: Launched) -> None:
    env = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
           "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_TOKEN": "secret"}  # fmt: skip
    doctor = ("doctor", "--job", "--json", "--wait", "60")
    head = launched.psgc(*doctor, **env, DMLC_ROLE="scheduler,server", DMLC_NODE_HOST="127.0.0.1")
    node = launched.psgc(*doctor, **{**env, "DMLC_NUM_SERVER": "2", "PSGC_PARTBYTES": "1"}, DMLC_ROLE="worker", DMLC_WORKER_ID="0")
    for popen in (head, node):
        status, out, err = launched.end(popen)
        report = json.loads(out)
        found = {each["check"]: each for each in report["findings"]}
        assert (status, report["ok"]) == (1, False), err
        assert (
            "DMLC_NUM_SERVER differs: " in found["settings"]["found"]
            and "PSGC_PARTBYTES is set but unknown" in found["environment"]["found"]
        )
        assert found.keys() <= {"settings", "environment", "cores", "memory", "GPUs"}, found
        assert "secret" not in out + err
