"""Over a slow link each payload travels once, and sums are right. The longer cases are ``benchmarks/slow_links.py``'s own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.benchmark_scripts import load

testbed = load("testbed")
slow_links = load("slow_links")
LACKING = testbed.why_not()
needs_hosts = pytest.mark.skipif(bool(LACKING), reason=f"no testbed here: {LACKING}")


@needs_hosts
@pytest.mark.long
def test_over_10_mbit_interfaces_carry_what_one_exchange_needs() -> None:
    """0.2 M parameters, four parts of up to half a second: what was asked after whenever it was quiet would be sent again."""
    case = replace(slow_links.CASES["10"], numel=200 * slow_links.SIDE)
    got = slow_links.measure(case, "psgc none", steps=2)
    assert got["resent"] == 0
    assert all(0.99 < moved / got["needed"] < 1.05 for moved in got["moved"]), got


@needs_hosts
@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("1", 1.05), ("loss", 1.15), ("cut", 2.0)])
def test_slower_links_and_worse_ones_give_right_sums_and_carry_no_byte_more_than_twice(name: str, most: float) -> None:
    """What TCP itself sends again is counted, too."""
    case = slow_links.CASES[name]
    got = slow_links.measure(case, case.systems[0], steps=3)
    assert all(moved / got["needed"] <= most for moved in got["moved"]), got


@pytest.mark.parametrize(
    ("name", "system", "megabytes"),
    [("100", "psgc none", 201.3), ("100-bf16", "ddp bf16", 100.7), ("broadcast", "psgc none", 151.0)],
)  # fmt: skip
def test_what_an_exchange_needs_over_each_interface(name: str, system: str, megabytes: float) -> None:
    assert slow_links.needed_bytes(slow_links.CASES[name], system) / 1e6 == pytest.approx(megabytes, abs=0.05)


def test_each_host_has_a_worker_and_a_server_and_the_first_the_scheduler() -> None:
    members: list[Any] = slow_links.members(testbed.Testbed(2), "psgc none", ["--numel", "1"])
    assert [(m.name, m.host, m.service) for m in members] == [
        ("scheduler", 0, True), ("server 0", 0, True), ("server 1", 1, True), ("node 0", 0, False), ("node 1", 1, False),
    ]  # fmt: skip
    assert {(m.env["DMLC_NUM_WORKER"], m.env["DMLC_NUM_SERVER"]) for m in members} == {("2", "2")}
