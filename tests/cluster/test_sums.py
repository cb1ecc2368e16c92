"""Every worker gets exactly the published tree of exactly the named step: real processes, real sockets, steps back to back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ALL_DTYPES = "float32,bfloat16,float16,float64,uint8,int8,int16,int32,int64,bool"
TRANSPORTS = ("tcp", "shm")


def exact(job: Any, transport: str, *arguments: str, codecs: tuple[str, ...] = ("none",)) -> None:
    workers = job.whole(*arguments, "--codec", *codecs, PSGC_TRANSPORT=transport)
    statuses = job.end()
    assert set(statuses.values()) == {0}, job.text()
    assert all(worker.text.count(" 0 wrong") == len(codecs) for worker in workers), job.text()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_600_back_to_back_steps_of_two_workers_are_right_to_the_bit(make_job: Callable[..., Any], transport: str) -> None:
    exact(make_job(nodes=2, servers=1), transport, "--steps", "600")


@pytest.mark.parametrize(("workers", "servers", "transport"), [(1, 1, "shm"), (5, 2, "tcp")])  # the long set has all
def test_every_dtype_is_right_to_the_bit(make_job: Callable[..., Any], workers: int, servers: int, transport: str) -> None:
    exact(make_job(nodes=workers, servers=servers), transport, "--steps", "15", "--dtypes", ALL_DTYPES)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_compressed_sums_follow_the_two_sided_algebra_to_the_bit(make_job: Callable[..., Any], transport: str) -> None:
    exact(make_job(nodes=3, servers=2), transport, "--steps", "20", codecs=("onebit", "int8", "topk:k=0.01", "onebit/bf16"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_and_relay_are_right_to_the_bit(make_job: Callable[..., Any], transport: str) -> None:
    exact(make_job(nodes=3, servers=2), transport, "--steps", "20", codecs=("shared", "shared:ef=0", "onebit/relay"))


def test_random_delays_change_nothing(make_job: Callable[..., Any]) -> None:
    exact(make_job(nodes=3, servers=2), "shm", "--steps", "60", "--delay-ms", "20")


def test_more_workers_than_a_block_follow_the_tree(make_job: Callable[..., Any]) -> None:
    exact(make_job(nodes=10, servers=1), "shm", "--steps", "10", "--dtypes", "float32,float16")


def test_a_small_window_and_one_credit_change_nothing(make_job: Callable[..., Any]) -> None:
    exact(make_job(nodes=3, servers=2, env={"PSGC_WINDOW_BYTES": "1", "BYTEPS_SCHEDULING_CREDIT": "1"}), "tcp", "--steps", "30")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_600_steps_of_every_shape_of_job(make_job: Callable[..., Any], workers: int, servers: int, transport: str) -> None:
    for codec, arguments in (("none", ("--dtypes", ALL_DTYPES)), ("onebit", ()), ("none", ("--delay-ms", "5"))):
        exact(make_job(nodes=workers, servers=servers, hang_s=900.0), transport, "--steps", "600", *arguments, codecs=(codec,))
