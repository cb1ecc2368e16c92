"""``psgc doctor --job`` finds what is wrong between a job's machines: each planted fault, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.launch.doctor.compare import Finding, Unreached, compare, complete
from psgc.launch.doctor.facts import EVERYWHERE, ON_WORKERS, Facts

GIB = 1 << 30
BOTH = "worker 0 (one), worker 1 (two)"
SETTINGS = {name: getattr(Config(nodes=2, servers=1, root_port=9000), name) for name in (*EVERYWHERE, *ON_WORKERS)}
COMMON: dict[str, Any] = {
    "settings": SETTINGS, "versions": {"psgc": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "pyzmq": "27.1", "libzmq": "4.3.5"}, "cores": 8,
    "memory": 8 * GIB, "files": 1 << 20, "cache": "/cache", "root": ("10.0.0.1",), "root_name": "head", "interface": "eth0", "mtu": 1500, "mbit": 10000,
    "fastest": ("eth0", 10000),
}  # fmt: skip


def machines(changed: int = 0, **facts: Any) -> list[Facts]:
    """A scheduler with a server, and two workers; one of the three differs."""
    sound = [
        Facts(hostname="head", roles=("scheduler", "server"), servers=1, addresses=("10.0.0.1",), **COMMON),
        Facts(hostname="one", roles=("worker",), node=0, workers=2, addresses=("10.0.0.2",), **COMMON),
        Facts(hostname="two", roles=("worker",), node=1, workers=2, addresses=("10.0.0.3",), **COMMON),
    ]
    sound[changed] = replace(sound[changed], **facts)
    return sound


def with_settings(changed: int, **settings: Any) -> list[Facts]:
    return machines(changed, settings={**SETTINGS, **settings})


def with_version(changed: int, **versions: str) -> list[Facts]:
    return machines(changed, versions={**COMMON["versions"], **versions})


def gpus(count: int, *more: Facts) -> list[Facts]:
    """The job with so many GPUs on each worker's machine."""
    return [replace(each, gpus=("H100",) * count if "worker" in each.roles else ()) for each in (more or machines())]


def test_sound_machines_have_no_fault() -> None:
    assert compare(machines()) == [] and complete(machines())
    assert compare(gpus(2)) == []


# What is planted, the check that finds it, whose it is, and what is said of it.
FAULTS: Sequence[tuple[str, list[Facts], str, str, str]] = (
    ("a node is missing", machines()[:2], "members", "worker 1", "did not report"),
    ("two nodes have one number", machines(2, node=0), "members", "worker 0 (one), worker 0 (two)", "all are DMLC_WORKER_ID=0"),
    ("a server is missing", machines(0, roles=("scheduler",), servers=0), "members", "the servers", "0 of 1"),
    ("two schedulers", machines(1, roles=("scheduler", "worker")), "members", "scheduler+server (head), scheduler+worker 0 (one)", "several schedulers"),
    ("no scheduler", machines(0, roles=("server",)), "members", "the job", "no scheduler"),
    ("roles contradict each other", with_settings(2, servers=2), "settings", "worker 1 (two)", "DMLC_NUM_SERVER differs: 1 on .*; 2 on worker 1"),
    ("one side encrypts", with_settings(1, encrypt=True), "settings", "worker 0 (one)", "PSGC_ENCRYPT differs"),
    ("workers have two codecs", with_settings(2, codec="int8"), "settings", BOTH, "PSGC_CODEC differs: int8 on worker 1 .*; none on worker 0"),
    ("a worker of another policy", with_settings(1, on_worker_loss="wait"), "settings", BOTH, "PSGC_ON_WORKER_LOSS differs: stop on .*; wait on worker 0"),
    ("one worker has a plan", machines(1, plan="file"), "settings", BOTH, "PSGC_PLAN differs: file on .*; not set on"),
    ("another version of psgc", with_version(2, psgc="0.2.0"), "versions", "worker 1 (two)", "psgc differs: 0.1.0 on .*; 0.2.0 on"),
    ("another torch", with_version(1, torch="2.4.1"), "versions", "worker 0 (one)", "torch differs: 2.13 on .*2.4 on"),
    ("a name that is not known", machines(1, root=()), "names", "worker 0 (one)", "DMLC_PS_ROOT_URI=head has no address there"),
    ("a name that leads to the machine itself", machines(1, root=("127.0.1.1",)), "names", "worker 0 (one)", "leads to 127.0.1.1, that machine itself"),
    ("a name with two meanings", machines(2, root=("10.9.9.9",)), "names", "worker 1 (two)", "the scheduler's address differs"),
    ("a server's address is another machine's", machines(0, node_host=("10.0.0.77",)), "names", "scheduler+server (head)", "no address of that machine"),
    ("the slow interface", machines(1, interface="eth1", mbit=1000), "interfaces", "worker 0 (one)", "leave by eth1 \\(1000 Mbit/s\\), but eth0 has 10000"),
    ("jumbo frames on one", machines(2, mtu=9000), "interfaces", "worker 1 (two)", "the MTU differs"),
    ("a clock is wrong", machines(1, clock_s=-7.25), "clocks", "worker 0 (one)", "-7.2 s from the scheduler's"),
    ("too few cores", machines(2, cores=1), "cores", "worker 1 (two)", "1 for 2 processes"),
    ("too little memory for the plan", machines(1, plan="file", plan_bytes=2 * GIB), "memory", "worker 0 (one)", "8192 MiB available; .* need 12288 MiB"),
    ("few pages may be locked", gpus(2, *machines(2, memlock=64 << 10)), "memlock", "worker 1 (two)", "64 KiB may be locked"),
    ("few files may be open", machines(1, files=256), "open files", "worker 0 (one)", "a hard limit of 256"),
    ("kernels cannot be kept", machines(2, cache=""), "kernel cache", "worker 1 (two)", "each start compiles"),
    ("ZeroMQ without CURVE", machines(1, curve=False), "ZeroMQ", "worker 0 (one)", "libzmq 4.3.5 has no CURVE"),
    ("fewer GPUs than workers", gpus(1, *machines(2, workers=2)), "GPUs", "worker 0 (one)", "1 for 2 workers"),
    ("a driver is missing", [*gpus(2)[:2], machines()[2]], "GPUs", BOTH, "whether a machine has GPUs differs"),
    ("two builds of NCCL", [replace(each, nccl=f"2.2{each.node + 1}") for each in gpus(2)], "NCCL", BOTH, "NCCL differs: 2.21 on .*; 2.22"),
    ("nodes of different sizes", machines(1, workers=3), "local size", BOTH, "workers of a node differs"),
    ("encryption cannot be imported", [replace(each, settings={**SETTINGS, "encrypt": True}, cryptography=each.node != 1) for each in machines()],
     "encryption", "worker 1 (two)", "cryptography is missing"),
    ("a machine that is wrong by itself", machines(1, wrong=(("loopback", "refused", "check firewall rules"),)), "loopback", "worker 0 (one)", "refused"),
)  # fmt: skip


@pytest.mark.parametrize(("what", "facts", "check", "whose", "said"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_planted_fault_is_found_with_whose_it_is_and_its_remedy(
    what: str, facts: list[Facts], check: str, whose: str, said: str
) -> None:
    found = [finding for finding in compare(facts) if finding.check == check and finding.whose == whose]
    assert any(re.search(said, finding.found) for finding in found), (what, compare(facts))
    assert all(finding.remedy for finding in compare(facts))


# What follows from a fault is said, too.
FOLLOWS = {
    "too little memory for the plan": {"settings"},
}  # fmt: skip


def test_a_fault_brings_no_others_with_it() -> None:
    for what, facts, check, _, _ in FAULTS:
        assert {finding.check for finding in compare(facts)} - {check} <= FOLLOWS.get(what, set()), (what, compare(facts))


def test_a_port_that_is_closed_and_a_machine_with_another_token_are_found() -> None:
    closed = Unreached("worker 1 (two)", "server (head)", "10.0.0.1:40000", "nothing comes back from there")
    reach, token = compare(machines(), [closed], ["10.0.0.66"])
    assert reach.check == "reachability" and reach.whose == "worker 1 (two) -> server (head)"
    assert reach.found == "10.0.0.1:40000: nothing comes back from there" and "firewalls" in reach.remedy
    assert token == Finding(
        "token", "10.0.0.66", "does not have the scheduler's PSGC_TOKEN", "set PSGC_TOKEN to the same text on every machine"
    )


def test_facts_travel_as_they_are_and_others_are_refused() -> None:
    for each in machines(1, wrong=(("loopback", "refused", "check firewall rules"),)):
        assert Facts.from_json(each.to_json()) == each
    document = machines()[0].to_json()
    for wrong in ([], {**document, "more": 1}, {**document, "cores": "8"}, {key: document[key] for key in list(document)[1:]}):
        with pytest.raises(RemoteProtocolError, match="a machine's facts"):
            Facts.from_json(wrong)
