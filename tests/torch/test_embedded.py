"""How the workers of a job find the scheduler that rank 0 starts: tickets in a store, and the job's secret."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import ConfigError, JobFailed, PsgcError
from psgc.launch.job import embedded as services
from psgc.torch.session.embedded import Embedded, _Services, await_services

TORCHRUN = {
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "PSGC_REGISTER_TIMEOUT_S": "200", "PSGC_HEARTBEAT_S": "0.1",
}  # fmt: skip


class Store:
    """What Embedded needs of torch's TCPStore, within this process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.ever: list[str] = []
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = self.values.get(key, 0) + amount
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.ever.append(value)
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return str(self.values[key]).encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class Lost(Store):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def config(rank: int, nodes: int = 1, **more: str) -> Config:
    own = {"RANK": str(rank), "LOCAL_RANK": "0" if nodes == 2 else str(rank), "GROUP_RANK": str(rank if nodes == 2 else 0)}
    return Config.from_env({**TORCHRUN, "LOCAL_WORLD_SIZE": "1" if nodes == 2 else "2", **own, **more})


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Embedded]:
    """A worker's part of it, whose services need no process."""

    def make(store: Store, own: Config, services: Callable[[Config], int] = lambda _: 4321) -> Embedded:
        made = Embedded(own, 0)
        monkeypatch.setattr(Embedded, "_join_store", lambda self: self.store)
        monkeypatch.setattr(Embedded, "_start_services", lambda self, complete: self.services(complete))
        monkeypatch.setattr(Embedded, "store", None, raising=False)
        made.store, made.services = store, services  # type: ignore[attr-defined]
        return made

    return make


def both(member: Callable[..., Embedded], store: Store, first: Config, second: Config) -> tuple[Config, Config]:
    """The configurations that ranks 0 and 1 go on with."""
    one, other = member(store, first), member(store, second)
    found: list[Config] = []
    thread = threading.Thread(target=lambda: found.append(other.start()))
    thread.start()
    mine = one.start()
    thread.join()
    one.close()
    other.close()
    return mine, found[0]


def test_all_workers_go_on_with_one_address_job_and_secret(member: Callable[..., Embedded]) -> None:
    mine, other = both(member, Store(), config(0), config(1))
    for name in ("root_host", "root_port", "job", "token", "servers", "nodes"):
        assert getattr(mine, name) == getattr(other, name)
    assert (mine.root_host, mine.root_port, mine.servers) == ("127.0.0.1", 4321, 1)
    assert mine.job and len(mine.token) == 32 and not mine.embedded


def test_on_one_node_the_drawn_secret_is_not_in_the_store(member: Callable[..., Embedded]) -> None:
    store = Store()
    mine, _ = both(member, store, config(0), config(1))
    assert store.ever and not [value for value in store.ever if mine.token in value]


def test_a_secret_that_is_set_is_not_in_the_store_either(member: Callable[..., Embedded]) -> None:
    store = Store()
    mine, other = both(member, store, config(0, 2, PSGC_TOKEN="our secret"), config(1, 2, PSGC_TOKEN="our secret"))
    assert mine.token == other.token == "our secret"
    assert store.ever and not [value for value in store.ever if "our secret" in value]


def test_between_nodes_a_drawn_secret_travels_through_the_store_and_the_user_is_told(
    member: Callable[..., Embedded], caplog: pytest.LogCaptureFixture
) -> None:
    apart = {"MASTER_ADDR": "10.0.0.1"}
    mine, other = both(member, Store(), config(0, 2, **apart), config(1, 2, **apart))
    assert mine.token == other.token and (mine.root_host, mine.servers) == ("10.0.0.1", 2)
    assert "travels through torchrun's store in clear" in caplog.text


def test_payloads_are_not_encrypted_with_a_secret_that_travelled_in_clear(member: Callable[..., Embedded]) -> None:
    with pytest.raises(ConfigError, match="PSGC_ENCRYPT=1 without PSGC_TOKEN"):
        member(Store(), config(0, 2, MASTER_ADDR="10.0.0.1", PSGC_ENCRYPT="1")).start()


def test_what_an_earlier_attempt_left_in_the_store_answers_nobody(member: Callable[..., Embedded]) -> None:
    store = Store()
    store.values |= {"asked": 3, **{f"told/{ticket}": '{"error": "an old one"}' for ticket in (1, 2, 3)}}
    mine, other = both(member, store, config(0), config(1))
    assert mine.root_port == other.root_port == 4321


def test_that_rank_0_could_not_start_the_scheduler_is_told_to_all(member: Callable[..., Embedded]) -> None:
    def refuse(_: Config) -> int:
        raise PsgcError("cannot listen on port 9")

    store, said = Store(), []

    def ask() -> None:
        try:
            member(store, config(1)).start()
        except JobFailed as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    one = member(store, config(0), refuse)
    with pytest.raises(PsgcError, match=r"cannot listen on port 9"):
        one.start()
    thread.join()
    one.close()
    assert said == ["rank 0 could not start the scheduler: cannot listen on port 9"]


def test_a_secret_that_only_some_nodes_have_is_an_error(member: Callable[..., Embedded]) -> None:
    store = Store()
    one = member(store, config(0, 2, PSGC_TOKEN="our secret"))
    one.start()
    with pytest.raises(ConfigError, match=r"^rank 0 has PSGC_TOKEN, and this worker has not: set the same on every node"):
        member(store, config(1, 2)).start()
    one.close()


def test_a_lost_store_and_a_silent_rank_0_are_told(member: Callable[..., Embedded]) -> None:
    with pytest.raises(JobFailed, match=r"the store at MASTER_ADDR=localhost, .*, is lost: rank 0 or its torchrun has ended"):
        member(Lost(), config(1)).start()
    with pytest.raises(JobFailed, match=r"rank 0 has not started the scheduler within 0\.1 s"):
        member(Store(), config(1, PSGC_REGISTER_TIMEOUT_S="0.1")).start()


@pytest.mark.parametrize(
    ("node", "first", "own"),
    [(0, 0, 2), (1, 2, 2), (2, 4, 1)],
)
def test_nodes_share_the_servers_as_evenly_as_can_be(monkeypatch: pytest.MonkeyPatch, node: int, first: int, own: int) -> None:
    orders: list[dict[str, Any]] = []

    class Stdin(io.BytesIO):
        def close(self) -> None:
            orders.append(json.loads(self.getvalue()))

    class Popen:
        def __init__(self, command: list[str], pass_fds: list[int], **_: Any) -> None:
            os.write(pass_fds[0], b'{"port": 7}')
            self.stdin = Stdin()

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("psgc.torch.session.embedded.subprocess.Popen", Popen)
    env = {**TORCHRUN, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "RANK": str(node), "LOCAL_RANK": "0", "DMLC_NUM_SERVER": "5"}
    assert Embedded(Config.from_env(env), 0)._start_services(Config.from_env(env)) == 7
    assert [(order["first_server"], order["own_servers"], order["scheduler"]) for order in orders] == [(first, own, node == 0)]


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "OWN_END_S", 0.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PsgcError, match=r"cannot listen on 127.0.0.1:.*is another job using the port"),
    ):
        services._listener("127.0.0.1", taken.getsockname()[1])


def test_a_worker_that_waits_for_others_at_its_end_says_so_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may hang in their own code, for as long as they like: its node's servers may be theirs, so it does not leave."""
    now = [0.0]

    class Popen:
        def poll(self) -> int | None:
            now[0] += 1.0
            return 0 if now[0] > 200.0 else None

    monkeypatch.setattr("psgc.torch.session.embedded.time.monotonic", lambda: now[0])
    monkeypatch.setattr("psgc.torch.session.embedded.time.sleep", lambda _: None)
    monkeypatch.setattr("psgc.torch.session.embedded._started", [_Services(Popen(), left=True)])  # type: ignore[arg-type]
    await_services()
    waits = [float(match[1]) for match in re.finditer(r"has waited for (\d+) s so far", caplog.text)]
    assert waits[0] <= 6 and max(b - a for a, b in pairwise([*waits, 200.0])) <= 62, waits
    assert len(waits) < 10, "it does not fill a log"
