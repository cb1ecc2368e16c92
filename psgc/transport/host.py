"""Identifies this machine and this process, so that two members of a job can compare them."""

from __future__ import annotations

import itertools
import os
import socket
from functools import cache
from pathlib import Path

from psgc.errors import ConfigError
from psgc.processes.addresses import is_loopback, lookup

OUTSIDE = ("192.0.2.1", "2001:db8::1")  # addresses that are kept for examples: the way to them is the default route


@cache
def host_id() -> str:
    """Boot id, network namespace and pid namespace: equal for two processes that can share memory and see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def pid_started(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is no such process. Tells a reused pid from the old one. Raises OSError where that cannot
    be told, as when this process has no descriptor left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    state, *rest = stat.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[18])  # a zombie is dead to its peers


@cache
def own_start() -> int:
    """``pid_started`` of this process. A member says it again and again, and must not seem another because it has no descriptor left."""
    return pid_started(os.getpid())


os.register_at_fork(after_in_child=own_start.cache_clear)


_sessions = itertools.count()


def session_number() -> int:
    """How many times this process, or the one that it was forked from, has called this before: the number of a member's session, so that the process's next
    session is not taken for this one."""
    return next(_sessions)


def process_alive(pid: int, started: int) -> bool:
    """Whether the process that started at ``started`` still runs. For pids of this host's pid namespace. Where it cannot be told, any process with this pid is
    taken for it: that the other is alive harms nobody, and that it is dead ends a job."""
    try:
        return pid_started(pid) == started
    except OSError:
        return _exists(pid)


def _exists(pid: int) -> bool:
    """Asks the kernel by a signal that none gets, which needs no descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def member_alive(host: str, pid: int, started: int) -> bool | None:
    """``process_alive`` for a process on the host with this id; None if that is another host."""
    return process_alive(pid, started) if host == host_id() else None


def same_network(one: str, other: str) -> bool:
    """Whether two hosts, given by their ids, have the same network: each reaches the other's loopback addresses."""
    return one.split("/")[:2] == other.split("/")[:2]


def local_address_for(remote: str) -> str:
    """The address of this machine that ``remote`` would see. Raises ConfigError if the name does not resolve."""
    try:
        family, address = lookup(remote, 9)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; only picks a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"DMLC_PS_ROOT_URI={remote!r} cannot be reached or resolved ({error}); give an address of the scheduler"
        ) from None


def address_for_others(remote: str) -> str:
    """``local_address_for``, but one that other hosts reach, where this machine has one: many machines' own name leads to 127.0.1.1. Raises ConfigError."""
    found = local_address_for(remote)
    if not is_loopback(found) or is_loopback(remote):
        return found
    for outside in OUTSIDE:
        try:
            outward = local_address_for(outside)
        except ConfigError:
            continue
        if not is_loopback(outward):
            return outward
    return found
