"""Several network interfaces of one machine (PSGC_INTERFACES): assigns them to local ranks and servers.

Owns the variable's form, and the addresses of interfaces that are named.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from psgc.errors import ConfigError
from psgc.launch.topology.detect import AUTO, detect
from psgc.launch.topology.devices import gpus_of_ranks
from psgc.launch.topology.machine import Topology
from psgc.processes.addresses import interface_address

NAME: Final = "PSGC_INTERFACES"
_machine = cache(detect)


def place_of(env: Mapping[str, str], number: int, look: Callable[[], Topology] | None = None) -> dict[str, str]:
    """DMLC_NODE_HOST of the local rank, or of the server, with this number; nothing where it is set already, or no interfaces are named. Interfaces that
    are named are taken in turn; ``auto`` is the one nearest to the GPU of the local rank of this number, where that is unknown each one that is up, in
    turn. look: at the machine. Raises ConfigError."""
    if env.get("DMLC_NODE_HOST", "").strip():
        return {}
    if env.get(NAME, "").strip() == AUTO:
        machine = (look or _machine)()
        near, up = machine.of_ranks(gpus_of_ranks(env, machine)).nearest_nic(), [nic for nic in machine.nics if nic.up]
        if not near and not up:
            return {}  # there is nothing to choose from
        return {"DMLC_NODE_HOST": interface_address((near[number] if number in near else up[number % len(up)]).name, NAME)}
    found = addresses(env)
    return {"DMLC_NODE_HOST": found[number % len(found)]} if found else {}


def named(env: Mapping[str, str]) -> int:
    """The number of interfaces that PSGC_INTERFACES names; 0 for none, and for ``auto``."""
    text = env.get(NAME, "").strip()
    return 0 if text == AUTO else sum(1 for each in text.split(",") if each.strip())


def addresses(env: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses of the interfaces that PSGC_INTERFACES names, in its order. Raises ConfigError for one that this machine does not have."""
    return tuple(_address(each.strip()) for each in env.get(NAME, "").split(",") if each.strip())


def _address(text: str) -> str:
    """The address itself, if it is one of this machine's, or the interface's, by its name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return interface_address(text, NAME)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((text, 0))
    except OSError as error:
        raise ConfigError(f"{NAME}: {text} is no address of this machine ({error.strerror}); `ip address` lists them") from None
    return text
