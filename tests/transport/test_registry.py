"""A transport is one file and one row: worker, server and scheduler carry a job over one that they have never heard of."""

from __future__ import annotations

import ast
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.layout import Declaration, TensorSpec
from psgc.scheduler import loop as scheduler_loop
from psgc.server import loop as server_loop
from psgc.transport import registry, selection
from psgc.transport.link import Listener, Transport
from psgc.transport.link_set import LinkSet
from psgc.transport.server_link import connect_server
from psgc.wire.frames import Kind
from psgc.wire.messages import ServerAddress
from psgc.worker.cluster import ClusterSession
from tests.descriptors import listening_sockets
from tests.jobs.array_buffer import ArrayBuffer
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
WORKERS, STEPS, NUMEL = 2, 3, 70001


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The toy transport, registered as the best."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(registry, "MODULES", {"within": "within_process", **registry.MODULES})
    monkeypatch.setattr(selection, "MODULES", registry.MODULES)
    import within_process

    within_process.CARRIED.clear()
    return within_process


def contribution(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal(NUMEL).astype(np.float32)


def train(config: Config) -> list[str]:
    """A worker: every sum is right; which transports its servers are reached by."""
    session = ClusterSession.open(config)
    declaration = Declaration("x", "adhoc", (TensorSpec("x", (NUMEL,), "float32"),), "none", False, part_bytes=65536)
    for step in range(STEPS):
        array = contribution(session.rank, step)
        session.wait([session.submit_named(declaration, ArrayBuffer(array))])
        assert np.array_equal(array, contribution(0, step) + contribution(1, step))
    used = [link.route.transport.name for link in session._network._push_pull.connections.links]
    session.close()
    return used


@pytest.mark.parametrize("choice", ["within", "auto"])
def test_a_job_runs_over_a_transport_that_is_one_file_and_one_row(within: Any, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # scheduler and server are threads here
    port = free_port()
    env = {
        "DMLC_NUM_WORKER": str(WORKERS), "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
        "PSGC_TRANSPORT": choice, "PSGC_TOKEN": "secret", "PSGC_REGISTER_TIMEOUT_S": "100",
    }  # fmt: skip
    ended: dict[str, Any] = {}

    def member(name: str, run: Callable[[Config], Any], **own: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: ended.__setitem__(name, run(Config.from_env({**env, **own}))), name=name, daemon=True)
        thread.start()
        return thread

    threads = [
        member("scheduler", scheduler_loop.serve, DMLC_ROLE="scheduler"), member("server", server_loop.serve, DMLC_ROLE="server"),
        *(member(f"worker {node}", train, DMLC_ROLE="worker", DMLC_WORKER_ID=str(node)) for node in range(WORKERS)),
    ]  # fmt: skip
    for thread in threads:
        thread.join(timeout=300)
    assert ended == {"scheduler": 0, "server": 0, "worker 0": ["within"], "worker 1": ["within"]}
    carried = Counter(header.kind for header in within.CARRIED)
    parts = -(-NUMEL * 4 // 65536)
    assert carried[Kind.PUSH] >= parts * STEPS * WORKERS
    assert carried[Kind.RESULT] == carried[Kind.PUSH]
    assert not within.LISTENERS, "the server has closed its listener"


def test_an_unknown_transport_is_refused_in_one_line_that_names_the_choices() -> None:
    choices = ", ".join(registry.choices())
    assert choices.startswith("auto, ")
    with pytest.raises(ConfigError, match=rf"^PSGC_TRANSPORT='smh' is wrong: expected one of {choices} .*; did you mean shm\?$"):
        Config.from_env({"PSGC_TRANSPORT": "smh"})
    with pytest.raises(ConfigError, match=rf"^PSGC_TRANSPORT=smh: unknown transport; choose one of {choices}; did you mean shm\?$"):
        selection.listen(Config(transport="smh"))


def listening(config: Config) -> list[str]:
    listeners: list[Listener] = selection.listen(config)
    addresses = [listener.address for listener in listeners]
    for listener in listeners:
        listener.close()
    return addresses


def test_a_server_listens_on_the_transport_asked_for_and_on_the_one_that_every_worker_can_use(within: Any) -> None:
    every = ["within", *(name for name in registry.MODULES if name != "within")]
    for choice, wanted in {"auto": every, "within": ["within", "tcp"], "shm": ["shm", "tcp"], "tcp": ["tcp"]}.items():
        addresses = listening(Config(transport=choice, root_host="127.0.0.1", root_port=1))
        assert [address.partition("://")[0] for address in addresses] == wanted


def test_where_one_cannot_listen_the_others_are_closed(within: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = listening_sockets()
        with pytest.raises(PsgcError, match="is another job using the port"):
            selection.listen(Config(root_host="127.0.0.1", root_port=1, port=taken.getsockname()[1]))
        assert listening_sockets() == before
    assert not within.LISTENERS


def test_a_transport_that_does_not_encrypt_is_not_used_where_payloads_are_to_be_encrypted(within: Any, monkeypatch: Any) -> None:
    asked = Config(transport="within", encrypt=True)
    assert selection.allowed(asked) == [within.TRANSPORT], "payloads do not leave the host"
    monkeypatch.setattr(within.Within, "local", False)
    with pytest.raises(ConfigError, match="PSGC_ENCRYPT=1, but PSGC_TRANSPORT=within does not encrypt; choose another transport"):
        selection.allowed(asked)
    names = [transport.name for transport in selection.allowed(Config(transport="auto", encrypt=True))]
    assert "within" not in names
    assert {"shm", "tcp"} <= set(names)


def test_a_worker_that_insists_on_a_transport_that_does_not_reach_the_server_is_told(within: Any) -> None:
    links = LinkSet()
    for server in (
        ServerAddress(3, "elsewhere", "tcp://10.0.0.5:9", ""),
        ServerAddress(3, "elsewhere", "tcp://10.0.0.5:9", "", ("within://a",)),
    ):
        with pytest.raises(
            PsgcError, match=r"PSGC_TRANSPORT=within, but server 3 at tcp://10\.0\.0\.5:9 cannot be reached by it; use auto"
        ):
            connect_server(server, links, Config(transport="within"), rank=0, epoch=1, key=bytes(32))
    links.close()


def names_in(path: Path) -> set[str]:
    """Every name, attribute and text of a module, and the modules that it imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_worker_server_and_scheduler_know_no_kind_of_link() -> None:
    transports: list[Transport] = [selection.transport(name) for name in registry.MODULES]
    concrete = {*registry.MODULES, *registry.MODULES.values()}
    for transport in transports:
        concrete |= {name for name, value in vars(__import__(type(transport).__module__, fromlist=["x"])).items()
                     if isinstance(value, type) and value.__module__ == type(transport).__module__}  # fmt: skip
    assert {"TcpLink", "LocalLink", "LocalListener", "tcp", "psgc.transport.shm"} <= concrete
    for folder in ("worker", "server", "psgc/scheduler"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not names_in(path) & concrete, f"{path.relative_to(ROOT)} names a transport: {names_in(path) & concrete}"
            assert not re.search(r"isinstance\([^)]*\b(Link|Place|Listener|Proof|ServerProof|WorkerProof)\b", path.read_text()), path
