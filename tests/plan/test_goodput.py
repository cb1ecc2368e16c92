"""What a job gets done and what that costs, with the arithmetic."""

from __future__ import annotations

import json

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.whatif.goodput import Prices, goodput
from tests.cases import for_each
from tests.plan.commands import psgc

CLUSTER = Cluster("c", nodes=4, gpus_per_node=2, intra=Link(100, 5), inter=Link(10, 20), servers=2)


def test_items_a_second_and_their_price_are_what_one_works_out_by_hand() -> None:
    """8 GPUs of 500 items in half a second: 8,000 items a second. 4 nodes at 10, 2 servers at 2 and 6 links at 1 are 50 an hour; a million
    items take 125 seconds, so 50 x 125 / 3600 = 1.7361."""
    found = goodput(5e5, 500, CLUSTER, Prices(node=10, server=2, link=1))
    assert found.items_per_s == pytest.approx(8000)
    assert found.us_per_item == pytest.approx(125)
    assert found.million == pytest.approx(1.73611, rel=1e-5)


def test_without_prices_nothing_is_said_to_be_free() -> None:
    assert goodput(5e5, 500, CLUSTER, Prices()).million is None


@for_each(prices=[(-1.0, 0.0, 0.0), (0.0, float("nan"), 0.0), (0.0, 0.0, float("inf"))])
def test_a_price_that_nobody_pays_is_refused(prices: tuple[float, float, float]) -> None:
    with pytest.raises(UsageError, match=r"the price of a .* an hour, expected 0 to"):
        Prices(*prices)


def test_advise_tells_goodput_of_every_candidate_and_asks_for_what_it_needs() -> None:
    job = ("advise", "--model", "gpt2", "--gpu", "a100", "--nodes", "4", "--gpus-per-node", "1", "--link", "10")
    done = psgc(*job, "--goodput", "--tokens", "8192", "--price-node", "4", "--json")
    assert done.returncode == 0, done.stderr
    for one in json.loads(done.stdout)["candidates"]:
        second = 4 * 8192 / (one["iteration_ms"] / 1e3)
        assert one["goodput"]["items_per_s"] == pytest.approx(second)
        assert one["goodput"]["price_per_million"] == pytest.approx(16 / 3600 * 1e6 / second)
    table = psgc(*job, "--goodput")
    assert "price of a million" in table.stdout and "tokens (or images) on each of 4 GPUs" in " ".join(table.stdout.split())
    lone = psgc(*job, "--price-node", "4")
    assert (lone.returncode, lone.stderr.count("\n")) == (2, 1) and "--price-node" in lone.stderr and "only with --goodput" in lone.stderr


def test_odd_prices_and_tokens_are_one_line_that_names_the_flag() -> None:
    job = ("advise", "--model", "gpt2", "--gpu", "a100", "--nodes", "4", "--gpus-per-node", "1", "--link", "10", "--goodput")
    for arguments, words in (
        (("--price-node", "-1"), "advise: --price-node -1: expected the price of an hour, 0 to 1e+09"),
        (("--price-link", "nan"), "advise: --price-link nan: expected the price of an hour"),
        (("--price-server", "inf"), "advise: --price-server inf: expected the price of an hour"),
        (("--tokens", "0"), "advise: --tokens 0: expected at least 1"),
    ):
        done = psgc(*job, *arguments)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, ""), arguments
        assert words in done.stderr
