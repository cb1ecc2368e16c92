"""Machines with two network interfaces each, as network namespaces: a local rank's bytes leave through the interface assigned to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load

testbed = load("testbed")
LACKING = testbed.why_not()
MB, ROUNDS = 1 << 20, 3
SCRIPT = f"""
import torch, psgc.torch as psgc

def sent():
    lines = (line.split() for line in open("/proc/self/net/dev").read().splitlines()[2:])
    return {{words[0].rstrip(":"): int(words[9]) for words in lines}}

psgc.init()
tensor = torch.ones({MB})
psgc.push_pull_inplace(tensor, name="t")  # connects
psgc.barrier()
before = sent()
psgc.barrier()
for _ in range({ROUNDS}):
    psgc.push_pull_inplace(tensor, name="t")
assert (tensor == 1).all()
psgc.barrier()
if psgc.local_rank() == 0:
    after = sent()
    print("sent", *(f"{{name}}={{after[name] - before[name]}}" for name in ("eth0", "eth1")), flush=True)
psgc.barrier()
psgc.shutdown()
"""


def add_interface(bed: Any) -> None:
    """An eth1 for each host, in a subnet and on a switch of its own."""
    switch = bed._namespace("switch")
    commands = [["-n", switch, "link", "add", "name", "bridge1", "type", "bridge"], ["-n", switch, "link", "set", "bridge1", "up"]]
    for host in range(len(bed.addresses)):
        name, port = bed._namespace(f"h{host}"), f"second{host}"
        commands += [
            ["link", "add", "name", "eth1", "netns", name, "type", "veth", "peer", "name", port, "netns", switch],
            ["-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "eth1"],
            ["-n", name, "link", "set", "eth1", "up"],
            ["-n", switch, "link", "set", port, "up", "master", "bridge1"],
        ]
    for words in commands:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.long
@pytest.mark.skipif(bool(LACKING), reason=f"no testbed here: {LACKING}")
@pytest.mark.timeout(300)
def test_a_local_ranks_share_of_the_bytes_leaves_by_its_interface(tmp_path: Path, capfd: Any) -> None:
    """Two ranks of a node sum first, then each exchanges its half with the other node's rank of the same interface: of 4 MiB a node sends 2 MiB by each
    interface, and little else."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with testbed.Testbed(2) as bed:
        add_interface(bed)
        members = testbed.psgc_job(bed, [sys.executable, str(script)], 2, 0, {"PSGC_INTERFACES": "eth0,eth1"}, 0)
        status = testbed.run_members(bed, members)
    said = "".join(capfd.readouterr())
    assert status == 0, said
    found = re.findall(r"sent eth0=(\d+) eth1=(\d+)", said)
    assert len(found) == 2, said
    for counted in found:
        assert all(1.0 <= int(sent) / (2 * MB * ROUNDS) <= 1.1 for sent in counted), found
