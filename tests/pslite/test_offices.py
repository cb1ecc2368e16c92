"""Postoffice, KVWorker and KVServer over sockets, within one process."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from psgc.config import Config
from psgc.errors import ConfigError, JobFailed, PsgcError, UsageError
from psgc.processes.addresses import interface_address
from psgc.pslite import WORKER_GROUP, KVMeta, KVPairs, KVServer, KVWorker, Postoffice, Settings
from psgc.pslite.meta import Meta
from tests.ports import free_port


class Store:
    """Keeps the last value of each key."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def __call__(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        if meta.push:
            self.values |= {key: bytes(pairs.value(i)) for i, key in enumerate(pairs.keys)}
            server.response(meta)
        else:
            found = [self.values[key] for key in pairs.keys]
            server.response(meta, KVPairs(pairs.keys, memoryview(b"".join(found)), tuple(map(len, found))))


def run_all(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call each in a thread of its own; return what they return, or raise what one raises."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def settings(role: Any, port: int, workers: int = 1, servers: int = 1, **more: Any) -> Settings:
    listen = port if role == "scheduler" else 0
    return Settings(role=role, workers=workers, servers=servers, root_host="127.0.0.1", root_port=port, port=listen, **more)


@contextmanager
def job(workers: int, servers: int, **more: Any) -> Iterator[tuple[list[Postoffice], list[KVWorker]]]:
    """All offices of a job, started; the workers' come first. Left together at the end."""
    port = free_port()
    offices = [
        Postoffice(settings(role, port, workers, servers, **more)) for role in ["worker"] * workers + ["server"] * servers + ["scheduler"]
    ]
    for office in offices[workers:-1]:
        KVServer(office).set_request_handle(Store())
    kv = [KVWorker(office) for office in offices[:workers]]
    run_all([office.start for office in offices])
    yield offices, kv
    run_all([office.finalize for office in offices])


def test_workers_push_and_pull_values_of_any_length_and_meet_at_barriers() -> None:
    for more in ({}, {"resend_s": 5.0, "heartbeat_s": 0.05}):
        with job(2, 2, **more) as (offices, kv):
            ranges = offices[0].server_key_ranges()
            assert sorted(office.my_rank for office in offices[:2]) == [0, 1]
            keys = (3, ranges[1].start + 8)

            def exchange(index: int, keys: tuple[int, ...] = keys) -> None:
                own = tuple(key + offices[index].my_rank for key in keys)
                for size in (0, 1, 200_000):
                    value = bytes([index + 1]) * size
                    kv[index].wait(kv[index].push(own, value + b"ab", (size, 2)), 30)
                    pairs = kv[index].wait(kv[index].pull(own), 30)
                    assert pairs.keys == own and bytes(pairs.value(0)) == value and bytes(pairs.value(1)) == b"ab"
                offices[index].barrier(WORKER_GROUP, 30)

            run_all([lambda: exchange(0), lambda: exchange(1)])
            with pytest.raises(UsageError, match="without keys"):
                kv[0].push((), b"")
            with pytest.raises(UsageError, match="request 77 is unknown"):
                kv[0].wait(77)


def test_a_call_to_an_office_that_has_ended_is_written_to_no_other_file() -> None:
    """Its descriptor stays its own: whoever stops it may still be writing when its thread has ended, and the number may be another file's by then."""
    with job(1, 1) as (offices, _):
        pass
    mailbox = offices[0]._van._mailbox
    mailbox.put(lambda: None)
    assert os.readlink(f"/proc/self/fd/{mailbox.fileno()}") == "anon_inode:[eventfd]"


def test_strangers_messages_are_dropped_and_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with job(1, 1) as (offices, kv), zmq.Context() as context, caplog.at_level(logging.WARNING):
        root = f"tcp://127.0.0.1:{offices[0].settings.root_port}"
        for name, frames in (
            (b"", [b"junk"]), (b"ps9x", [Meta(command=3, request=True, barrier_group=4).pack()]), (b"ps1", [Meta().pack()] * 9),
            (b"", [Meta(head=0, app_id=0, request=True).pack()]), (b"", [b""]),
        ):  # fmt: skip
            with context.socket(zmq.DEALER) as stranger:
                if name:
                    stranger.setsockopt(zmq.ROUTING_ID, name)
                stranger.connect(root)
                stranger.send_multipart(frames)
                while sum("dropped" in record.message for record in caplog.records) == 0:
                    threading.Event().wait(0.01)
                caplog.clear()
        kv[0].wait(kv[0].push((1,), b"abc"), 30)
        assert bytes(kv[0].wait(kv[0].pull((1,)), 30).vals) == b"abc"


def test_a_job_that_never_gets_complete_ends_with_who_is_missing() -> None:
    port = free_port()
    lonely = [Postoffice(settings(role, port, 2, 1, join_timeout_s=0.3)) for role in ("scheduler", "worker")]
    errors: dict[int, str] = {}

    def start(index: int) -> None:
        with pytest.raises(JobFailed) as raised:
            lonely[index].start()
        errors[index] = str(raised.value)

    run_all([lambda: start(0), lambda: start(1)])
    assert "of 1 servers to join at 127.0.0.1" in errors[0]
    assert "the ps-lite scheduler at 127.0.0.1" in errors[1] and "2 workers and 1 servers" in errors[1]
    for office in lonely:
        office.finalize()


def test_a_taken_port_and_an_unknown_interface_are_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        office = Postoffice(settings("scheduler", taken.getsockname()[1]))
        with pytest.raises(PsgcError, match=r"cannot listen on 127\.0\.0\.1:.* for ps-lite: Address already in use"):
            office.start()
        office.finalize()
    assert interface_address("lo", "X") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"^X: no interface 'nosuch0' with an IPv4 address; this machine has .*lo"):
        interface_address("nosuch0", "X")


BASE = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "PSGC_WIRE": "pslite"}


def test_roles_listen_on_the_interface_that_is_named_and_else_on_loopback() -> None:
    assert Settings.of(Config.from_env(BASE, role="worker")).host == "127.0.0.1"
    assert Settings.of(Config.from_env({**BASE, "DMLC_INTERFACE": "lo"}, role="server")).host == "127.0.0.1"
    assert Settings.of(Config.from_env({**BASE, "DMLC_NODE_HOST": "10.0.0.7"}, role="server")).host == "10.0.0.7"
    scheduler = Settings.of(Config.from_env(BASE, role="scheduler"))
    assert (scheduler.host, scheduler.port) == ("10.0.0.1", 9000)
    assert "everybody who reaches 10.0.0.1 can read and change" in scheduler.warning
    resending = Settings.of(Config.from_env({**BASE, "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "250", "PS_HEARTBEAT_INTERVAL": "2"}))
    assert (resending.resend_s, resending.heartbeat_s) == (0.25, 2.0)


def test_settings_that_ps_lite_cannot_honour_are_refused() -> None:
    for more, said in (
        ({"PSGC_TOKEN": "secret"}, "PSGC_WIRE=pslite and PSGC_TOKEN: ps-lite has no authentication"), ({"DMLC_NUM_SERVER": "0"}, "start one or more"),
        ({"PSGC_TOKEN": "x", "PSGC_ENCRYPT": "1"}, "unset one of the two"), ({"PSGC_PLAN": "auto"}, "no plans"),
        ({"BYTEPS_LOCAL_SIZE": "2"}, "each worker is a node of its own"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            Settings.of(Config.from_env({**BASE, **more}))


def test_settings_of_ps_lite_are_reported_where_psgcs_own_wire_ignores_them() -> None:
    own = {name: value for name, value in BASE.items() if name != "PSGC_WIRE"} | {"PS_RESEND": "1", "DMLC_LOCAL": "1"}
    assert sum("without PSGC_WIRE=pslite" in note for note in Config.from_env(own).notes) == 2
    assert not Config.from_env({**own, "PSGC_WIRE": "pslite"}).notes
