"""Hosts and ports: what people write is understood or refused, and a socket listens for everybody."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import replace
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.processes import addresses
from psgc.processes.addresses import bare_host, endpoint, is_loopback, join, listening_socket, needs_ipv6, split
from psgc.transport.host import address_for_others, local_address_for, same_network
from psgc.transport.tcp import TRANSPORT

needs_v6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("text", "host"),
    [("10.0.0.1", "10.0.0.1"), ("::1", "::1"), ("[::1]", "::1"), (" fe80::1%eth0 ", "fe80::1%eth0"), ("node-1.site", "node-1.site")],
)
def test_a_host_is_told_with_or_without_brackets(text: str, host: str) -> None:
    assert bare_host(text) == host
    assert split(join(host, 9000)) == split(endpoint(host, 9000)) == (host, 9000)
    assert Config.from_env({"DMLC_PS_ROOT_URI": text, "DMLC_PS_ROOT_PORT": "9000"}).root_endpoint == f"tcp://{join(host, 9000)}"


@pytest.mark.parametrize("text", ["10.0.0.1:9000", "tcp://host", "[::1", "::1]", "[10.0.0.1]", "1:2:3", "a b", "[]", "host/"])
def test_what_is_no_host_is_refused_by_the_name_of_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DMLC_PS_ROOT_URI=.*a host name or an IP address, without a port"):
        Config.from_env({"DMLC_PS_ROOT_URI": text})


@pytest.mark.parametrize("text", ["host", "::1:9000", "host:", "host:x", "host:0", "host:65536", "[::1]", ":9000"])
def test_an_advertised_address_needs_host_and_port(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PSGC_ADVERTISE=.*IPv6 address in brackets"):
        Config.from_env({"PSGC_ADVERTISE": text})


def test_an_advertised_ipv6_address_is_kept() -> None:
    assert Config.from_env({"PSGC_ADVERTISE": "[2001:db8::1]:9000"}).advertise == "[2001:db8::1]:9000"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True), ("LocalHost.", True),
     ("10.0.0.1", False), ("2001:db8::1", False), ("::ffff:10.0.0.1", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_loopback_is_told_from_other_addresses(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_a_name_with_both_kinds_of_address_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"both": (socket.AF_INET, socket.AF_INET6), "new": (socket.AF_INET6,)}

    def look(host: str, port: Any, family: int = 0, *_: Any, **__: Any) -> list[Any]:
        found = [f for f in known.get(host, ()) if family in (0, f)]
        if not found:
            raise socket.gaierror
        return found

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look)
    assert [needs_ipv6(host) for host in ("both", "new", "unheard-of", "10.0.0.1", "::1")] == [False, True, True, False, True]


@needs_v6
def test_a_listening_socket_hears_both_families() -> None:
    with listening_socket() as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=10).close()


@needs_v6
@pytest.mark.parametrize("taken", ["0.0.0.0", "::"])
def test_a_port_that_is_taken_in_either_family_is_taken(taken: str) -> None:
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as other, pytest.raises(PsgcError, match=r"cannot listen on port .* in use"):
        listening_socket(other.getsockname()[1])


@needs_v6
def test_the_address_that_the_scheduler_sees_is_of_its_family() -> None:
    assert (local_address_for("::1"), local_address_for("127.0.0.1")) == ("::1", "127.0.0.1")


def test_a_scheduler_that_cannot_be_looked_up_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"DMLC_PS_ROOT_URI='no\.such\.host\.invalid' cannot be reached or resolved"):
        local_address_for("no.such.host.invalid")


def test_containers_of_one_network_reach_each_others_loopback() -> None:
    assert same_network("boot/1/2", "boot/1/3")
    assert not same_network("boot/1/2", "boot/4/2")
    assert not same_network("boot/1/2", "other/1/2")


@pytest.fixture
def at_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose own name, node0, leads to 127.0.1.1 there, and which has a way out."""
    real = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        return real(
            {"node0": "127.0.1.1", "192.0.2.1": "127.0.0.1", "2001:db8::1": "no.such.host.invalid"}.get(host, host), *arguments, **options
        )

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.usefixtures("at_itself")
def test_a_server_on_the_schedulers_machine_is_reached_by_its_name_where_that_leads_to_the_machine_itself() -> None:
    config = Config(role="server", nodes=2, root_host="node0", root_port=9000)
    with contextlib.closing(TRANSPORT.listen(config)) as listener:
        assert re.fullmatch(r"tcp://node0:\d+", listener.address)
    with contextlib.closing(TRANSPORT.listen(replace(config, root_host="127.0.0.1"))) as listener:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", listener.address)


def test_the_address_for_others_is_the_default_routes_where_the_schedulers_name_leads_to_the_machine_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached = {"node0": "127.0.0.1", "192.0.2.1": "10.1.2.3", "10.0.0.9": "10.0.0.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr("psgc.transport.host.local_address_for", lambda remote: reached[remote])
    assert [address_for_others(host) for host in ("node0", "10.0.0.9", "localhost")] == ["10.1.2.3", "10.0.0.1", "127.0.0.1"]
