"""Which processes of a job each of its hosts runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psgc.errors import UsageError
from psgc.launch.job.hostfile import Host


@dataclass(frozen=True, slots=True)
class Place:
    """One host's part. node: its number among those with workers; -1: it has none. workers: 0: as many as its own psgc-launch finds (node >= 0), or none.
    first_server: number of the first of its servers. spare: it has nothing to run until another host with workers is lost."""

    host: Host
    node: int = -1
    workers: int = 0
    servers: int = 0
    first_server: int = 0
    scheduler: bool = False
    spare: bool = False

    @property
    def roles(self) -> str:
        """DMLC_ROLE."""
        return ",".join(
            role for role, here in (("scheduler", self.scheduler), ("server", self.servers), ("worker", self.node >= 0)) if here
        )


def place(hosts: Sequence[Host], workers: int | None, servers: int | None, scheduler: str | None = None) -> list[Place]:
    """hosts: in order, those of servers among them. workers: of all of them together, which fill the slots of one host after the other; None: one a slot.
    servers: of all of them together; None: one a host, or as many as the hosts of servers have slots. scheduler: its host; None: that of rank 0. Hosts
    without anything to run are left out, but for spare ones, which come last. Raises UsageError."""
    spare, serving = [host for host in hosts if host.spare], [host for host in hosts if host.servers]
    working = [host for host in hosts if not (host.servers or host.spare)]
    if not working:
        raise UsageError(
            "run: the hosts' file has hosts of servers, or spare ones, only; rank 0 needs a host without `server` or `spare` before it"
        )
    working, slots = _filled(working, workers)
    if spare and not all(slots):
        raise UsageError(
            f"run: {spare[0].name} is a spare host, but nothing says how many workers each other host has; write slots=N behind these, or give --workers"
        )
    shares = _shares(servers, serving, len(working))
    of_servers = {host.name: share for host, share in zip(serving, shares, strict=True)} if serving else {}
    places: list[Place] = []
    first = 0
    for node, (host, size) in enumerate(zip(working, slots, strict=True)):
        own = of_servers.pop(host.name, 0) if serving else shares[node]  # a host of both runs both
        places.append(Place(host, node, size, own, first))
        first += own
    for host in serving:
        if own := of_servers.get(host.name, 0):
            places.append(Place(host, servers=own, first_server=first))
            first += own
    reserve = [Place(host, spare=True) for host in spare]
    at = next((number for number, one in enumerate(places) if one.host.name == scheduler), None if scheduler else 0)
    if at is None:
        return [*places, Place(Host(str(scheduler)), scheduler=True), *reserve]
    return [*(replace(one, scheduler=number == at) for number, one in enumerate(places)), *reserve]


def with_ssh_port(places: Sequence[Place], port: int) -> list[Place]:
    """The scheduler's host is reached at this port of ssh. Raises UsageError if the hosts' file names another one for it."""
    host = next(one.host for one in places if one.scheduler)
    if host.port not in (0, port):
        raise UsageError(
            f"run: --scheduler-ssh-port {port}, but the hosts' file has port {host.port} for {host.name}; a host has one connection"
        )
    return [replace(one, host=replace(one.host, port=port)) if one.scheduler else one for one in places]


def _filled(working: list[Host], workers: int | None) -> tuple[list[Host], list[int]]:
    """The hosts that have workers, and how many; 0: as many as they find themselves, where no host has slots."""
    if workers is None:
        return working, [max(1, host.slots) if any(one.slots for one in working) else 0 for host in working]
    if workers < 1:
        raise UsageError(f"run: --workers {workers}: at least 1")
    slots = [max(1, host.slots) for host in working]
    if workers > sum(slots):
        raise UsageError(f"run: --workers {workers}, but the hosts' file has {_counted(sum(slots))}; give hosts more with slots=N")
    filled, left = [], workers
    for size in slots:
        filled.append(min(size, left))
        left -= filled[-1]
    return [host for host, size in zip(working, filled, strict=True) if size], [size for size in filled if size]


def _shares(servers: int | None, serving: Sequence[Host], nodes: int) -> list[int]:
    """Servers of each host of servers, or else of each host of workers."""
    if serving:
        own = [max(1, host.slots) for host in serving]
        if servers is not None and servers != sum(own):
            raise UsageError(
                f"run: --servers {servers}, but the `server` lines have {_counted(sum(own))}; leave --servers out, or change slots=N there"
            )
        return own
    if servers is not None and servers < 0:
        raise UsageError(f"run: --servers {servers}: 0 or more")
    total = nodes if servers is None else servers
    return [total // nodes + (node < total % nodes) for node in range(nodes)]


def _counted(slots: int) -> str:
    return f"{slots} slot{'' if slots == 1 else 's'}"
