"""Hosts of a job, as people write them: Open MPI's, Horovod's and DeepSpeed's files, and those of BytePS's dist_launcher. Pure: text in, hosts out.

One host a line: ``host slots=8``, ``user@host``, ``host port=2222`` (of ssh), IPv6 with or without brackets. What follows ``#`` is a comment.
``server host``: a host of servers. ``spare host``: it takes the place of one that is lost. A host on several lines has the sum of their slots. In BytePS's
files ``host:2222`` names ssh's port.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from psgc.errors import UsageError
from psgc.processes.addresses import bare_host

# max_slots is Open MPI's limit on what it may put there beyond slots, which is never done here.
KEYS: Final = ("slots", "port", "max_slots", "max-slots")
SERVER: Final = "server"
SPARE: Final = "spare"


@dataclass(frozen=True, slots=True)
class Host:
    """name: as ssh takes it, without user and port. slots: workers, or servers, on it; 0: not said. port: of ssh; 0: ssh's own choice. servers: its slots
    are servers, not workers. spare: they are workers' places, once another host is lost."""

    name: str
    slots: int = 0
    user: str = ""
    port: int = 0
    servers: bool = False
    spare: bool = False


def read_hosts(path: str, servers: bool = False, byteps: bool = False) -> list[Host]:
    """The hosts of a file, in its order. servers: all of them are hosts of servers. byteps: a file of BytePS's. Raises UsageError that names the file and the
    line."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"run: hosts' file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            try:
                host = _host_of(text, byteps)
            except ValueError as error:
                raise UsageError(f"run: {path}, line {number}: {error}; expected a line such as `host slots=8`") from None
            hosts.append(replace(host, servers=host.servers or servers))
    if not hosts:
        raise UsageError(f"run: hosts' file {path} names no host; expected a line such as `host slots=8` for each")
    return merged(hosts, path)


def _host_of(text: str, byteps: bool) -> Host:
    words = text.split()
    role = words[0] if len(words) > 1 and words[0] in (SERVER, SPARE) and "=" not in words[1] else ""
    first, *settings = words[bool(role) :]
    user, at, name = first.rpartition("@")
    if at and not user:
        raise ValueError(f"{first!r} has no user before @")
    port = 0
    if found := re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]+):(\d+)", name):
        if not byteps:
            raise ValueError(
                f"{name!r} has a number after its colon: write slots={found[2]} if it counts workers, port={found[2]} if it is ssh's port"
            )
        name, port = found[1], _number("port", found[2], 65535)
    try:
        name = bare_host(name)
    except ValueError as error:
        raise ValueError(f"{error}" if "is no host" in str(error) else f"{name!r} is no host") from None
    if name.startswith("-"):
        raise ValueError(f"{name!r} is no host")
    given: dict[str, int] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or key not in KEYS:
            raise ValueError(f"{setting!r} is not understood; a host has slots=N and port=N")
        given[key] = _number(key, value, 65535)
    return Host(name, given.get("slots", 0), user, given.get("port", port), role == SERVER, role == SPARE)


def _number(key: str, text: str, most: int) -> int:
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise ValueError(f"{key}={text}: expected a whole number from 1 to {most}")
    return int(text)


def merged(hosts: Iterable[Host], path: str) -> list[Host]:
    """Each host once, with the sum of its lines' slots: a line without counts as one, if there are several. Raises UsageError for lines that contradict each
    other."""
    found: dict[tuple[str, bool, bool], Host] = {}
    for host in hosts:
        key = (host.name, host.servers, host.spare)
        if key not in found:
            found[key] = host
            continue
        one = found[key]
        if (one.user, one.port) != (host.user, host.port):
            raise UsageError(f"run: {path}: host {host.name} is there with different users or ports; a host has one connection")
        found[key] = replace(one, slots=max(1, one.slots) + max(1, host.slots))
    return list(found.values())
