"""Chooses transports by the value of PSGC_TRANSPORT: those that a server listens on, and the one by which a worker reaches a server."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib import import_module

from psgc.config import Config
from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import ConfigError
from psgc.transport.link import Listener, Transport
from psgc.transport.registry import AUTO, FALLBACK, MODULES, choices


def transport(name: str) -> Transport:
    """The transport of this name. Raises ConfigError if the registry has none."""
    if name not in MODULES:
        raise ConfigError(f"PSGC_TRANSPORT={name}: unknown transport; choose one of {', '.join(choices())}{did_you_mean(name, choices())}")
    found: Transport = import_module(MODULES[name]).TRANSPORT
    return found


def allowed(config: Config) -> list[Transport]:
    """The transports that ``config`` allows, the best first. Raises ConfigError if the one that it names does not encrypt although it has to."""
    if config.transport == AUTO:
        return [found for found in map(transport, MODULES) if _keeps_secret(found, config)]
    named = transport(config.transport)
    if not _keeps_secret(named, config):
        raise ConfigError(f"PSGC_ENCRYPT=1, but PSGC_TRANSPORT={named.name} does not encrypt; choose another transport")
    return [named]


def listen(config: Config, left: Mapping[str, socket.socket] = {}) -> list[Listener]:
    """A server's listeners, one for each transport that some worker may choose. left: by transport, sockets that a former process of this server has left.
    Raises ConfigError, or PsgcError if one cannot listen."""
    chosen = allowed(config)
    if all(each.name != FALLBACK for each in chosen):
        chosen.append(transport(FALLBACK))
    listeners: list[Listener] = []
    try:
        for each in chosen:
            listeners.append(each.listen_with(config, left[each.name]) if each.name in left else each.listen(config))
    except Exception:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def reaching(addresses: Mapping[str, str], config: Config, same_host: bool) -> Transport | None:
    """The best transport that reaches a server from here; None if none does. addresses: the server's, by the transport's name."""
    for candidate in allowed(config):
        address = addresses.get(candidate.name)
        if address and candidate.reaches(address, same_host):
            return candidate
    return None


def _keeps_secret(candidate: Transport, config: Config) -> bool:
    return not config.encrypt or candidate.local or candidate.encrypts
