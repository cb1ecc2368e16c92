"""Simulated members against a real scheduler and a real server, few enough for every day: benchmarks/members.py measures the many."""

from __future__ import annotations

from tests.benchmark_scripts import load

members = load("members")


def test_a_storm_of_declarations_is_one_declaration_and_a_layout_for_everybody() -> None:
    found = members.storm(ranks=24, tensors=300, servers=2)
    assert found["declarations_read"] == 1
    assert found["server_s"] is not None, "the servers' heartbeats are recorded"


def test_everybody_gets_the_right_sums_though_all_push_at_once() -> None:
    """The script itself compares every result with what it must be."""
    found = members.pushes(ranks=12, keys=80)
    assert 0 < found["first_result_s"] <= found["last_result_s"]
