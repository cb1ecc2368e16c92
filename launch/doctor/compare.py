"""Finds faults in the facts of a job's machines. Pure: ``compare`` gets the facts, and which machine could connect to which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psgc.launch.doctor.facts import EVERYWHERE, ON_WORKERS, Facts
from psgc.processes.addresses import is_loopback
from psgc.variables import VARIABLES

CLOCK_S: Final = 0.5  # difference of two clocks; psgc itself depends on none
MEMLOCK: Final = 64 << 20  # what a machine with GPUs or RDMA should be able to pin
FILES_OF_A_PROCESS: Final = 1024
COPIES: Final = 3  # of the gradients in a process: the bucket, the residual, the payloads
_NAMES: Final = {variable.field: variable.name for variable in VARIABLES}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. whose: the machine, or several."""

    check: str
    whose: str
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """One machine could not connect to a port of another's."""

    source: str
    target: str
    address: str
    error: str


def compare(machines: Sequence[Facts], unreached: Iterable[Unreached] = (), strangers: Iterable[str] = ()) -> list[Finding]:
    """All faults, in the order of the checks. strangers: addresses of those that do not have the scheduler's token."""
    found = [finding for check in CHECKS for finding in check(machines)]
    found += [
        Finding("reachability", f"{one.source} -> {one.target}", f"{one.address}: {one.error}",
                "open the port in the firewalls between the two (servers take any free port, or DMLC_PORT); correct DMLC_NODE_HOST or PSGC_ADVERTISE "
                "of the server if the address is wrong")
        for one in unreached
    ]  # fmt: skip
    found += [
        Finding("token", address, "does not have the scheduler's PSGC_TOKEN", "set PSGC_TOKEN to the same text on every machine")
        for address in strangers
    ]
    return found


def complete(machines: Sequence[Facts]) -> bool:
    """Whether everybody has come: one scheduler, all nodes, all servers."""
    return not any(attendance(machines))


def attendance(machines: Sequence[Facts]) -> Iterator[Finding]:
    """The machines that are missing, or that have come twice."""
    schedulers = [each for each in machines if "scheduler" in each.roles]
    if not schedulers:
        yield Finding("members", "the job", "no scheduler", "start one machine with DMLC_ROLE=scheduler")
        return
    nodes, servers = (int(schedulers[0].settings[name]) for name in ("nodes", "servers"))
    if len(schedulers) > 1:
        yield Finding("members", _whose(schedulers), "several schedulers", "DMLC_ROLE=scheduler on one machine only")
    seen = Counter(each.node for each in machines if "worker" in each.roles)
    for node in range(nodes):
        if not seen[node]:
            yield Finding("members", f"worker {node}", "did not report", "run `psgc doctor --job` there with DMLC_ROLE=worker and "
                          f"DMLC_WORKER_ID={node}; if you did: does it reach the scheduler's address?")  # fmt: skip
    for node, count in sorted(seen.items()):
        if count > 1:
            whose = [each for each in machines if "worker" in each.roles and each.node == node]
            yield Finding("members", _whose(whose), f"all are DMLC_WORKER_ID={node}", f"number the nodes from 0 to {nodes - 1}, each once")
    started = sum(each.servers for each in machines)
    if started != servers:
        yield Finding(
            "members", "the servers", f"{started} of {servers} (DMLC_NUM_SERVER)",
            "start as many servers as DMLC_NUM_SERVER says, over all machines (PSGC_LOCAL_SERVERS: on one machine), or correct it",
        )  # fmt: skip
    numbers = Counter(each.server_index + number for each in machines if each.server_index >= 0 for number in range(each.servers))
    for number, count in sorted(numbers.items()):
        if count > 1:
            whose = [
                each for each in machines if each.servers and 0 <= number - each.server_index < each.servers and each.server_index >= 0
            ]
            yield Finding(
                "members",
                _whose(whose),
                f"all have a server DMLC_SERVER_ID={number}",
                "number the servers from 0, each once, or leave it out",
            )


def _settings(machines: Sequence[Facts]) -> Iterator[Finding]:
    for names, asked in ((EVERYWHERE, machines), (ON_WORKERS, [each for each in machines if "worker" in each.roles])):
        for name in names:
            yield from _differ("settings", asked, lambda each, name=name: str(each.settings.get(name)), _NAMES[name],  # type: ignore[misc]
                               f"set {_NAMES[name]} to the same on all of them")  # fmt: skip
    workers = [each for each in machines if "worker" in each.roles]
    yield from _differ("settings", workers, lambda each: each.plan or "not set", "PSGC_PLAN", "set PSGC_PLAN for every worker, or for none")


def _sizes(machines: Sequence[Facts]) -> Iterator[Finding]:
    workers = [each for each in machines if "worker" in each.roles]
    if not all(each.node_sizes for each in workers):
        yield from _differ("local size", workers, lambda each: str(each.workers), "workers of a node",
                           "where that is meant, set PSGC_NODE_SIZES on every machine, as in 4,4,2")  # fmt: skip


def _versions(machines: Sequence[Facts]) -> Iterator[Finding]:
    for package in ("psgc", "python", "torch", "numpy", "numba", "pyzmq", "libzmq"):
        exact = package == "psgc"
        yield from _differ(
            "versions", [each for each in machines if package in each.versions],
            lambda each, package=package, exact=exact: _version(each.versions[package], exact), package,  # type: ignore[misc]
            f"install one version of {package} everywhere",
        )  # fmt: skip


def _version(text: str, exact: bool) -> str:
    return text if exact else ".".join(text.split(".")[:2])


def _names(machines: Sequence[Facts]) -> Iterator[Finding]:
    remote = len({each.hostname for each in machines}) > 1
    for each in machines:
        if not each.root:
            yield Finding(
                "names",
                each.name,
                f"DMLC_PS_ROOT_URI={each.root_name} has no address there",
                "correct it, DNS, or /etc/hosts on that machine",
            )
        elif remote and all(map(is_loopback, each.root)) and "scheduler" not in each.roles:
            yield Finding(
                "names", each.name, f"DMLC_PS_ROOT_URI={each.root_name} leads to {', '.join(each.root)}, that machine itself",
                "give an address that the other machines reach, or correct /etc/hosts on that machine",
            )  # fmt: skip
    others = [each for each in machines if each.root and not any(map(is_loopback, each.root))]
    yield from _differ("names", others, lambda each: ", ".join(each.root), "the scheduler's address", "correct DNS or /etc/hosts, or give an address in "
                       "DMLC_PS_ROOT_URI")  # fmt: skip
    for each in machines:
        if "server" in each.roles and each.node_host and not set(each.node_host) & set(each.addresses):
            loopback = all(map(is_loopback, each.node_host))
            if loopback and not remote:
                continue
            kind = "a loopback address" if loopback else "no address of that machine"
            yield Finding("names", each.name, f"DMLC_NODE_HOST leads to {', '.join(each.node_host)}, {kind} (it has {', '.join(each.addresses)})",
                          "set DMLC_NODE_HOST to an address of that machine that workers reach, or leave it out")  # fmt: skip


def _interfaces(machines: Sequence[Facts]) -> Iterator[Finding]:
    remote = [each for each in machines if each.interface and each.interface != "lo"]
    for each in remote:
        fastest, mbit = each.fastest
        if 0 < each.mbit < mbit:
            yield Finding(
                "interfaces", each.name, f"packets for the scheduler leave by {each.interface} ({each.mbit} Mbit/s), but {fastest} has {mbit} Mbit/s",
                f"use the scheduler's address in the network of {fastest} in DMLC_PS_ROOT_URI, and DMLC_NODE_HOST on servers",
            )  # fmt: skip
    yield from _differ("interfaces", [each for each in remote if each.mtu], lambda each: str(each.mtu), "the MTU", "set one MTU on all of these "
                       "interfaces: larger packets may be lost on the way to smaller ones")  # fmt: skip


def _clocks(machines: Sequence[Facts]) -> Iterator[Finding]:
    for each in machines:
        if abs(each.clock_s) > CLOCK_S:
            yield Finding("clocks", each.name, f"{each.clock_s:+.1f} s from the scheduler's", "synchronise it (chrony, systemd-timesyncd): training works, "
                          "but logs of the machines cannot be compared")  # fmt: skip


def _resources(machines: Sequence[Facts]) -> Iterator[Finding]:
    planned = max((each.plan_bytes for each in machines), default=0)
    servers = max(1, *(int(each.settings.get("servers", 1)) for each in machines)) if machines else 1
    members = sum(each.workers + each.servers for each in machines) + 1
    for each in machines:
        processes = each.workers + each.servers + ("scheduler" in each.roles)
        if each.cores < processes:
            yield Finding(
                "cores", each.name, f"{each.cores} for {processes} processes", "give it more cores (taskset, cgroup), or start fewer there"
            )
        need = COPIES * planned * each.workers + COPIES * planned * each.servers // servers
        if need > each.memory:
            yield Finding(
                "memory", each.name, f"{each.memory >> 20} MiB available; the plan's gradients need {need >> 20} MiB there",
                "end other programs, raise the container's limit, or start more servers on other machines",
            )  # fmt: skip
        if (each.gpus or each.rdma) and 0 <= each.memlock < MEMLOCK:
            yield Finding(
                "memlock", each.name, f"{each.memlock >> 10} KiB may be locked", "ulimit -l unlimited (docker run --ulimit memlock=-1)"
            )
        if 0 <= each.files < (wanted := FILES_OF_A_PROCESS + 8 * members):
            yield Finding(
                "open files",
                each.name,
                f"a hard limit of {each.files}",
                f"ulimit -n {max(65536, wanted)}, in limits.conf or the container's settings",
            )
        if not each.cache:
            yield Finding(
                "kernel cache", each.name, "no folder can be written, so that each start compiles", "set NUMBA_CACHE_DIR to a folder there"
            )


def _builds(machines: Sequence[Facts]) -> Iterator[Finding]:
    for each in machines:
        if not each.curve:
            yield Finding("ZeroMQ", each.name, f"libzmq {each.versions.get('libzmq', '')} has no CURVE, which control messages need",
                          "pip install --force-reinstall pyzmq (its wheels have it)")  # fmt: skip
        if each.settings.get("encrypt") and not each.cryptography:
            yield Finding(
                "encryption", each.name, "PSGC_ENCRYPT=1, but the package cryptography is missing", "pip install 'psgc[encrypt]' there"
            )


def _gpus(machines: Sequence[Facts]) -> Iterator[Finding]:
    workers = [each for each in machines if "worker" in each.roles]
    for each in workers:
        if 0 < len(each.gpus) < each.workers:
            yield Finding(
                "GPUs",
                each.name,
                f"{len(each.gpus)} for {each.workers} workers",
                "lower BYTEPS_LOCAL_SIZE, or correct NVIDIA_VISIBLE_DEVICES",
            )
    yield from _differ(
        "GPUs", workers, lambda each: str(len(each.gpus) > 0), "whether a machine has GPUs", "is a driver missing (nvidia-smi)?"
    )
    yield from _differ(
        "NCCL", [each for each in workers if each.nccl], lambda each: each.nccl, "NCCL", "install one build of torch everywhere"
    )


def _own(machines: Sequence[Facts]) -> Iterator[Finding]:
    """The faults that each machine found with itself, without those that the comparisons above report."""
    for each in machines:
        for name, found, remedy in each.wrong:
            yield Finding(name, each.name, found, remedy)


def _differ(check: str, machines: Sequence[Facts], value: Callable[[Facts], str], what: str, remedy: str) -> Iterator[Finding]:
    """One finding if the machines differ: the values, each with those that have it, the most frequent one first. Whose: all that do not have the most
    frequent value; all of them where no value is more frequent than another."""
    groups: dict[str, list[Facts]] = {}
    for each in machines:
        groups.setdefault(value(each), []).append(each)
    if len(groups) > 1:
        ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
        told = "; ".join(f"{text or 'nothing'} on {_whose(group)}" for text, group in ordered)
        apart = ordered if len(ordered[0][1]) == len(ordered[1][1]) else ordered[1:]
        yield Finding(
            check, _whose([each for each in machines if any(each in group for _, group in apart)]), f"{what} differs: {told}", remedy
        )


def _whose(machines: Sequence[Facts]) -> str:
    return ", ".join(each.name for each in machines)


CHECKS: Final[tuple[Callable[[Sequence[Facts]], Iterator[Finding]], ...]] = (
    attendance, _settings, _sizes, _versions, _names, _interfaces, _clocks, _resources, _builds, _gpus, _own,
)  # fmt: skip


def rows(findings: Sequence[Finding]) -> list[list[str]]:
    return [[each.check, each.whose, each.found, each.remedy] for each in findings]


def to_json(findings: Sequence[Finding]) -> list[Mapping[str, Any]]:
    return [{"check": each.check, "whose": each.whose, "found": each.found, "remedy": each.remedy} for each in findings]
